"""Seeding: decides how long the trainer's machines generate before they train.

After RLBoost's Algorithm 1 (arXiv 2510.19225, section 4.1). In its step model, R member-seconds of work are done by N
engines of the trainer for T_seed and by n members from x on, while training takes T after T_seed. Both end together if
x + (R - N T_seed) / n = T_seed + T, which gives `closed_form_s`. The controller finds it from the two waits.
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

    This is t_remote * n_prem + T_seed * N_resv of Algorithm 1, line 10. engines: the trainer's, as a number of members
    that decode as much. transfer_s, engine_start_s: until a member began, and until an engine did.
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
    """How long the trainer's machines generated: at most as long as there was work."""
    return min(before.seeding_s or 0.0, transfer_s + waits.rollout_s)


def members_needed(work_s: float, train_s: float) -> float:
    """N_prem: with this many members generation takes no longer than training; more would only wait (line 10)."""
    return work_s / train_s if train_s > 0 else float("inf")


def closed_form_s(
    work_s: float, train_s: float, transfer_s: float, engines: float, members: int, floor_s: float
) -> float:
    """The controller's fixed point, (R - n (T - x)) / (N + n), but at least `floor_s`.

    transfer_s: x, until a member begins. This is the module's balance of both sides, solved for T_seed.
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
    """The seeding time of the next iteration, and what is remembered from now on.

    before, waits: of the last concluded iteration; train_s: seconds of training, None: unknown. members: of the crew,
    as planned now. engines: as in `work_engine_s`. transfer_s, engine_start_s: until a member begins, and until an
    engine of the trainer does; both may be long.

    The time is the first of these that applies: None (until nothing is left) without members; 0 if there are as many as
    `members_needed`; the time remembered for this number of members; the closed form of the last iteration's work, if
    the number of members has changed or the last time was the first one; and else what the controller says.
    A time in which an engine would hardly begin becomes 0.
    """
    chosen = _chosen(before, waits, members, engines, transfer_s, train_s, engine_start_s)
    if chosen.seeding_s is not None and chosen.seeding_s <= engine_start_s:
        return replace(chosen, seeding_s=0.0)
    return chosen


def _chosen(
    before: SeedingRecord | None,
    waits: StepWaits | None,
    members: int,
    engines: float,
    transfer_s: float,
    train_s: float | None,
    engine_start_s: float,
) -> SeedingRecord:
    work_s = work_engine_s(waits, before, engines, transfer_s, engine_start_s)
    known = _adapted(before, waits, work_s, engines, transfer_s)
    if members == 0:
        return replace(known, seeding_s=None, members=0)
    if work_s is not None and train_s is not None and members >= members_needed(work_s, train_s):
        return replace(known, seeding_s=0.0, members=members)
    was_first = is_initial(before)
    remembered = None if was_first else known.memory.get(str(members))
    if remembered is not None:
        return replace(known, seeding_s=remembered, members=members)
    if (was_first or known.members != members) and work_s is not None and train_s is not None:
        to_do_s = work_s + engines * engine_start_s
        fixed_s = closed_form_s(to_do_s, train_s, transfer_s, engines, members, SEEDING_S_MIN)
        return replace(known, seeding_s=min(fixed_s, to_do_s / engines), members=members)
    return replace(known, members=members)


def _adapted(
    before: SeedingRecord | None,
    waits: StepWaits | None,
    work_s: float | None,
    engines: float,
    transfer_s: float,
) -> SeedingRecord:
    """Lines 9 to 14: the time changed by the difference of the waits, and remembered if membership was constant.

    Line 9 divides by eta. One more second of seeding changes that difference by 1 + N / n, so the rule would diverge if
    this exceeded 2 eta. The divisor is therefore at least 1 + N / n, with which it never overshoots the fixed point.
    The time does not exceed R / N either, in which the trainer's engines do all the work.
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


def generates_again(alone_s: float, settings: PlanningConfig, *, crew_ended: bool = False) -> bool:
    """Whether the trainer's machines begin to generate again in the middle of an iteration.

    alone_s: how long no other member has lived. crew_ended: no member of the crew will come any more, so waiting is in
    vain.
    """
    return settings.seeding == "auto" and (crew_ended or alone_s >= settings.seeding_after_s)


def is_initial(before: SeedingRecord | None) -> bool:
    """Whether the last iteration's seeding time was the first one, chosen without any knowledge."""
    return before is not None and not before.memory and before.seeding_s == SEEDING_S_INITIAL
