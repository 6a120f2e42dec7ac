"""A plan's decisions as records: the inputs, the alternatives, and a plain sentence with the reason of each.

Predictions have the names of the report's metrics (docs/guide/metrics.md) for comparison. A plan predicts nothing
without a measured step time.
"""

from resources.prices import dollars
from storage.records.planning_records import DecisionRecord, SeedingRecord
from tasks.planning.division import assign_groups
from tasks.planning.estimate import Estimate
from tasks.planning.makespan import lower_bound_s
from tasks.planning.planned_crew import engines_in_members, measured_work_s
from tasks.planning.request import PlanningRequest
from tasks.planning.seeding import closed_form_s, is_initial, members_needed
from tasks.planning.width import WidthChoice, allowed_usd, describe

ALTERNATIVES_MAX = 16
# Names in decisions: of two metrics of the report, and of the decision about the kind of crew.
ROLLOUT, ITERATION, CREW = "timing_s/rollout", "timing_s/iteration", "crew"
Figures = dict[str, float]
# A standing trainer holds its machine between phases, unlike a train task. Below this share of an iteration for reading
# and writing the state, the held machine may cost as much as the state's time.
STANDING_SHARE_MIN = 0.03


def explain(request: PlanningRequest, choice: WidthChoice) -> tuple[DecisionRecord, ...]:
    """One record for each decision of the plan."""
    found = (
        _lengths(request),
        _width(request, choice),
        _balance(request, choice),
        _seeding(request, choice),
        _dispatch(request, choice),
        _crew(request, choice.estimate),
    )
    return tuple(decision for decision in found if decision is not None)


def _lengths(request: PlanningRequest) -> DecisionRecord:
    lengths = request.lengths
    known = lengths.predictor != "none"
    return DecisionRecord(
        name="lengths",
        chosen=lengths.predictor,
        reason="the best predictor available" if known else "nothing tells the groups apart",
        inputs={
            "groups": float(len(lengths)),
            "expected_mean": float(lengths.expected.mean()),
            "expected_max": float(lengths.expected.max()),
            "high_max": float(lengths.high.max()),
        },
    )


def _width(request: PlanningRequest, choice: WidthChoice) -> DecisionRecord:
    settings, crew = request.settings, choice.crew
    inputs = {"usd_allowed": allowed_usd(request)[1], "cost_weight": settings.cost_weight}
    inputs |= {"train_s": request.training_s or 0.0, "tool_s_per_token": request.tool_s_per_token}
    inputs |= {f"{pool.name}/usd_per_h": pool.usd_per_h for pool in request.pools}
    inputs |= {f"{pool.name}/losses_per_h": pool.losses_per_h for pool in request.pools}
    inputs |= {f"{pool.name}/start_s": pool.start_s for pool in request.pools}
    unknown = {"usd_allowed": float("inf"), "train_s": 0.0, "tool_s_per_token": 0.0}
    if settings.width != "cost":
        inputs.pop("cost_weight")
    return DecisionRecord(
        name="width",
        chosen=describe(request, crew.counts),
        reason=choice.reason,
        inputs={name: value for name, value in inputs.items() if value != unknown.get(name)},
        alternatives={
            describe(request, other.counts): _figures(request, other) | {"score": score}
            for other, score in choice.considered[:ALTERNATIVES_MAX]
        },
        predicted=_figures(request, choice.estimate) if request.measured else {},
    )


def _figures(request: PlanningRequest, one: Estimate) -> Figures:
    """The predicted figures of a crew; the iteration's dollars only if the trainer's price is known."""
    figures = {ROLLOUT: one.rollout_s, ITERATION: one.iteration_s}
    if sum(one.counts):
        figures |= {"timing_s/rollout_machines": one.machines_s, "cost/usd_rollout": one.usd_rollout}
    return figures if request.reserved is None else figures | {"cost/usd_iter": one.usd_iteration}


def _balance(request: PlanningRequest, choice: WidthChoice) -> DecisionRecord | None:
    step = choice.step
    if step is None or request.waits is None:
        return None
    inputs = {"generation_s": request.waits.rollout_s, "train_s": request.training_s or 0.0, "delta_s": step.delta_s}
    saved = {} if step.saved_s is None else {"saved_by_one_more_s": step.saved_s}
    return DecisionRecord(
        name="balance", chosen=f"{step.change:+d}" if step.change else "0", reason=choice.reason, inputs=inputs | saved
    )


def _seeding(request: PlanningRequest, choice: WidthChoice) -> DecisionRecord | None:
    crew = choice.crew
    seeding, reserved = crew.seeding, request.reserved
    if seeding is None or reserved is None:
        return None
    inputs = {"members": float(seeding.members), "engines": float(reserved.engines)}
    waits, train_s = request.waits, request.training_s
    if waits is not None:
        inputs |= {"wait_train_s": waits.wait_train_s, "wait_remote_s": waits.wait_remote_s}
    alternatives: dict[str, Figures] = {}
    work_s = measured_work_s(request)
    needed = members_needed(work_s, train_s) if work_s is not None and train_s else None
    if work_s is not None and train_s and needed is not None:
        inputs |= {"train_s": train_s, "members_needed": needed}
        starts = [member.start_s for member in crew.members[: crew.size]]
        if seeding.members:
            start_s, engines = sum(starts) / len(starts), engines_in_members(request)
            to_do_s = work_s + engines * reserved.start_s
            ideal_s = closed_form_s(to_do_s, train_s, start_s, engines, seeding.members, 0.0)
            alternatives = {"both sides end together": {"seeding/seconds": ideal_s}}
    alternatives |= {_so_long(way.seeding): {ITERATION: way.iteration_s} for way in choice.ways[1:] and choice.ways}
    seconds = seeding.seeding_s
    # The first way is what the controller says.
    differs = len(choice.ways) > 1 and seeding != choice.ways[0].seeding
    if differs:
        reason = f"the iteration is expected to end sooner than with {_so_long(choice.ways[0].seeding)}"
    elif seconds is None:
        absent = "no member of the crew is expected to be there"
        reason = absent if crew.size else "all is left to the trainer's machines"
    elif seconds > 0:
        reason = _why_so_long(request, seeding, knows_work=needed is not None)
    elif needed is not None and seeding.members >= needed:
        reason = "the members alone generate for no longer than training takes"
    else:
        reason = "the engines would hardly have begun by then"
    if request.measured:
        seconds = choice.estimate.rollout_s if seconds is None else min(seconds, choice.estimate.rollout_s)
    return DecisionRecord(
        name="seeding",
        chosen=_so_long(seeding),
        reason=reason,
        inputs=inputs,
        alternatives=alternatives,
        predicted={} if seconds is None else {"seeding/seconds": seconds},
    )


def _so_long(seeding: SeedingRecord | None) -> str:
    seconds = 0.0 if seeding is None else seeding.seeding_s
    return "until nothing is left" if seconds is None else f"{seconds:.1f} s" if seconds else "none"


def _why_so_long(request: PlanningRequest, seeding: SeedingRecord, *, knows_work: bool) -> str:
    before, waits = request.seeding, request.waits
    if before is None:
        return "the first time, so as configured"
    if seeding.seeding_s == before.memory.get(str(seeding.members)):
        return f"the time that suited {seeding.members} members before"
    if knows_work and (is_initial(before, request.settings) or before.members != seeding.members):
        return "the time that the last iteration's work needs"
    if before.seeding_s is None:
        return "as configured, because the members' work is unknown"
    if waits is None or waits.members <= 0:
        return "as before, because the waits are unknown"
    longer = waits.wait_train_s > waits.wait_remote_s
    return f"the {'trainer' if longer else 'crew'} waited for longer than the {'crew' if longer else 'trainer'}"


def _dispatch(request: PlanningRequest, choice: WidthChoice) -> DecisionRecord:
    crew = choice.crew
    dealt_in_turn = assign_groups(len(request.lengths), len(crew.members))
    in_turn = tuple(assignment.groups for assignment in crew.assignments) == dealt_in_turn
    isolated = sum(a.batch_max is not None for a in crew.assignments)
    aim = "the last response ends early" if request.settings.objective == "makespan" else "members may leave early"
    by = "speed" if request.lengths.predictor == "none" else "length"
    if request.settings.dispatch == "in_turn":
        reason = "as dispatch: in_turn says"
    elif in_turn:
        reason = "groups and members are all alike, or no dealing is better"
    else:
        reason = f"by {'what each member can do' if by == 'speed' else 'expected length'}, so that {aim}"
    alternatives = {}
    if request.measured:
        bound_s = lower_bound_s(request.responses, crew.members)
        alternatives = {"chosen": {ROLLOUT: crew.makespan_s}, "no dealing is faster than": {ROLLOUT: bound_s}}
    return DecisionRecord(
        name="dispatch",
        chosen="in turn" if in_turn else f"by {by}; {isolated} members with a smaller batch",
        reason=reason,
        inputs={
            "groups": float(len(request.lengths)),
            "members": float(len(crew.members)),
            "isolated": float(isolated),
        },
        alternatives=alternatives,
        predicted={ROLLOUT: choice.estimate.rollout_s} if request.measured else {},
    )


def _crew(request: PlanningRequest, estimate: Estimate) -> DecisionRecord | None:
    """The kind of crew with its costs: dollars of waiting for the next plan, and dollars of starting members anew.

    None without a crew, and without measured starts and step times. A start is the start of a process without engine
    and weights, on a running machine.
    """
    crew = [(pool, count) for pool, count in zip(request.pools, estimate.counts, strict=True) if count]
    if not request.measured or not any(pool.cold_start_s for pool, _ in crew):
        return None
    wait_s = max(0.0, estimate.iteration_s - estimate.rollout_s)
    usd_wait = sum(count * dollars(wait_s, pool.usd_per_h) for pool, count in crew)
    usd_start = sum(count * dollars(pool.cold_start_s, pool.usd_per_h) for pool, count in crew)
    cheaper = "standing" if usd_wait <= usd_start else "iteration"
    too = ", too" if request.crew == cheaper else ""
    return DecisionRecord(
        name=CREW,
        chosen=request.crew,
        reason=f"as rollout.crew says; '{cheaper}' is expected to cost less{too}",
        inputs={
            "wait_s": wait_s,
            "usd_wait": usd_wait,
            "usd_start": usd_start,
            **{f"{pool.name}/start_s": pool.cold_start_s for pool, _ in crew},
        },
    )


def advice_to_stand(placement: str, state_s: float, iteration_s: float) -> str:
    """One line that recommends trainer.placement "standing"; empty for a small state, and for a trainer that keeps it.

    Args:
        placement: trainer.placement.
        state_s: seconds of an iteration in which the trainer restores and writes its state.
        iteration_s: seconds of the whole iteration; 0: unknown, so the line is empty.
    """
    if placement not in ("own", "pod") or not iteration_s or state_s / iteration_s <= STANDING_SHARE_MIN:
        return ""
    return (
        f"restoring and writing the trainer's state takes {state_s:.0f} s of an iteration of {iteration_s:.0f} s "
        f"({state_s / iteration_s:.0%}); trainer.placement 'standing' keeps it in memory (with planning.seeding 'off')"
    )
