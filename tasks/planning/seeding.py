"""Seeding: decides how long the trainer's machines generate before they train.

After RLBoost's Algorithm 1 (arXiv 2510.19225, section 4.1). In the step model, N engines of the trainer work for T_seed
and n members from x on, together R member-seconds, while training takes T after T_seed. Generation and training end
together if x + (R - N T_seed) / n = T_seed + T, solved by `closed_form_s`. The controller reaches the solution from the
two waits.
"""

from dataclasses import replace

from storage.records.planning_records import SeedingRecord
from tasks.configuration.planning import PlanningConfig
from tasks.planning.capacity import StepWaits

# RLBoost's eta: the seeding time changes by the difference of the two waits, divided by at least this.
ADAPTATION = 3.0
# The seeding time while nothing is known of the work, and the least one, unless the crew alone is enough.
SEEDING_S_INITIAL, SEEDING_S_MIN = 150.0, 5.0


def work_engine_s(
    waits: StepWaits | None,
    before: SeedingRecord | None,
    engines: float,
    transfer_s: float = 0.0,
    engine_start_s: float = 0.0,
) -> float | None:
    """R: the member-seconds of the last iteration's rollout; None if unknown.

    R = t_remote * n_prem + T_seed * N_resv (Algorithm 1, line 10).

    Args:
        waits: waits of the last concluded iteration; None before the first.
        before: seeding of the last concluded iteration; None without seeding.
        engines: the trainer's engines as a number of members with equal speed.
        transfer_s: seconds until a member began.
        engine_start_s: seconds until an engine of the trainer began.
    """
    if waits is None:
        return None
    if waits.generated_s is not None:
        return waits.rollout_s * waits.members + waits.generated_s * engines
    if before is not None and before.seeding_s is None:
        # Colocated: there was no crew member, or the report does not say how much the members did.
        return waits.rollout_s * engines if waits.members == 0 and waits.rollout_s else None
    seeded_s = 0.0 if before is None else _seeded_s(before, waits, transfer_s)
    return waits.rollout_s * waits.members + max(0.0, seeded_s - engine_start_s) * engines


def _seeded_s(before: SeedingRecord, waits: StepWaits, transfer_s: float) -> float:
    """Seconds for which the trainer's machines generated: at most until no work was left."""
    return min(before.seeding_s or 0.0, transfer_s + waits.rollout_s)


def members_needed(work_s: float, train_s: float) -> float:
    """N_prem: the members with which generation takes no longer than training; more members would wait (line 10)."""
    return work_s / train_s if train_s > 0 else float("inf")


def closed_form_s(
    work_s: float, train_s: float, transfer_s: float, engines: float, members: int, floor_s: float
) -> float:
    """The controller's fixed point, (R - n (T - x)) / (N + n), but at least `floor_s`.

    The module's balance of both sides, solved for T_seed. transfer_s: x, the seconds until a member begins.
    """
    return max(floor_s, (work_s - members * (train_s - transfer_s)) / (engines + members))


def next_seeding(
    before: SeedingRecord | None,
    waits: StepWaits | None,
    *,
    members: int,
    engines: float,
    transfer_s: float,
    train_s: float | None,
    engine_start_s: float = 0.0,
) -> SeedingRecord:
    """The seeding of the next iteration: the time, and the memory of times by number of members.

    The first rule that applies decides the time:
    - no members: None, until nothing is left;
    - at least `members_needed` members: 0;
    - a remembered time for the number of members: the remembered time;
    - a new number of members, or a last time equal to the first time: the closed form of the last
      iteration's work;
    - else: the controller's time.
    A time in which an engine would hardly begin becomes 0.

    Args:
        before: seeding of the last concluded iteration; None without seeding.
        waits: waits of the last concluded iteration; None before the first.
        members: planned members of the crew.
        engines: as in `work_engine_s`.
        transfer_s: seconds until a member begins.
        train_s: seconds of training; None: unknown.
        engine_start_s: seconds until an engine of the trainer begins.
    """
    work_s = work_engine_s(waits, before, engines, transfer_s, engine_start_s)
    known = _adapted(before, waits, work_s, engines, transfer_s)
    if members == 0:
        return replace(known, seeding_s=None, members=0)
    seeding_s = known.seeding_s
    was_first = is_initial(before)
    remembered = None if was_first else known.memory.get(str(members))
    if work_s is not None and train_s is not None and members >= members_needed(work_s, train_s):
        seeding_s = 0.0
    elif remembered is not None:
        seeding_s = remembered
    elif (was_first or known.members != members) and work_s is not None and train_s is not None:
        to_do_s = work_s + engines * engine_start_s
        fixed_s = closed_form_s(to_do_s, train_s, transfer_s, engines, members, SEEDING_S_MIN)
        seeding_s = min(fixed_s, to_do_s / engines)
    if seeding_s is not None and seeding_s <= engine_start_s:
        seeding_s = 0.0
    return replace(known, seeding_s=seeding_s, members=members)


def _adapted(
    before: SeedingRecord | None,
    waits: StepWaits | None,
    work_s: float | None,
    engines: float,
    transfer_s: float,
) -> SeedingRecord:
    """Lines 9 to 14: the time changed by the difference of the waits, and remembered if membership was constant.

    Line 9 divides by eta. One more second of seeding changes the difference by 1 + N / n, so the rule would diverge for
    1 + N / n above 2 eta. A divisor of at least 1 + N / n never overshoots the fixed point. The time stays at most
    R / N, in which the trainer's engines would do all the work.
    """
    if before is None:
        return SeedingRecord(seeding_s=SEEDING_S_INITIAL, members=0)
    if before.seeding_s is None:
        return replace(before, seeding_s=SEEDING_S_INITIAL)
    if waits is None or waits.members <= 0:
        return before
    divisor = max(ADAPTATION, 1 + engines / waits.members)
    seeding_s = _seeded_s(before, waits, transfer_s) + (waits.wait_train_s - waits.wait_remote_s) / divisor
    if work_s is not None:
        seeding_s = min(seeding_s, work_s / engines)
    seeding_s = max(seeding_s, SEEDING_S_MIN)
    unchanged = round(waits.members) == waits.members_at_end
    memory = {**before.memory, **({str(waits.members_at_end): seeding_s} if unchanged else {})}
    return SeedingRecord(seeding_s=seeding_s, members=before.members, memory=memory)


def generates_again(
    alone_s: float, seeding_after_s: float, settings: PlanningConfig, *, crew_ended: bool = False
) -> bool:
    """True if the trainer's machines begin to generate again in the middle of an iteration.

    Args:
        alone_s: seconds since the last live member of the crew.
        seeding_after_s: seconds after which the trainer's machines generate.
        settings: section `planning` of the configuration.
        crew_ended: True if no member of the crew will come, so waiting is in vain.
    """
    return settings.seeding == "auto" and (crew_ended or alone_s >= seeding_after_s)


def is_initial(before: SeedingRecord | None) -> bool:
    """True if the last iteration's seeding time was the first time, chosen without measurements."""
    return before is not None and not before.memory and before.seeding_s == SEEDING_S_INITIAL
