"""The crew of a plan: the members and the first groups of each. tasks/planning/estimate.py estimates its time."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from storage.records.planning_records import SeedingRecord
from storage.records.records import TRAIN_POOL
from tasks.crew_model.step_time import NOMINAL, StepTime
from tasks.crew_model.tool_waits import decoded_together, while_held
from tasks.planning.capacity import GroupLengths, PoolCapacity, TrainerCapacity
from tasks.planning.dispatch import MANY_RESPONSES, Assignment, DispatchMember, dispatch
from tasks.planning.division import assign_groups
from tasks.planning.makespan import ends_s, group_ends_s, streamed_s
from tasks.planning.request import PlanningRequest
from tasks.planning.seeding import next_seeding, work_engine_s


@dataclass(frozen=True, kw_only=True)
class PlannedCrew:
    """The members of a plan with their groups.

    Attributes:
        counts: members of each pool, in the request's order.
        members: members of the crew, pool by pool, then the trainer's engines if the trainer generates.
        assignments: groups of each member, in the order of `members`.
        seeding: how long the trainer's machines generate; None if the trainer's machines never generate.
        makespan_s: seconds until the last response has ended if no member takes work from another member.
    """

    counts: tuple[int, ...]
    members: tuple[DispatchMember, ...]
    assignments: tuple[Assignment, ...]
    seeding: SeedingRecord | None
    makespan_s: float

    @property
    def size(self) -> int:
        return sum(self.counts)


def planned_crew(request: PlanningRequest, counts: tuple[int, ...], seeding: SeedingRecord | None) -> PlannedCrew:
    """The crew with `counts` members of each pool and the given seeding, with groups assigned to the members.

    Seconds of the crew are meaningful if `request.measured`.
    """
    size = sum(counts)
    capacities = [pool for pool, count in zip(request.pools, counts, strict=True) for _ in range(count)]
    crew = [_members(request, pool, count) for pool, count in zip(request.pools, counts, strict=True)]
    members = tuple(chain.from_iterable(crew))
    if seeding is not None and seeding.seeding_s != 0 and request.reserved is not None:
        members += (_engine(request, request.reserved),) * request.reserved.engines
    assignments = _assigned(request, members)
    makespan_s = max(assignment.ends_s for assignment in assignments)
    assignments = _all_begin(assignments, size)
    if request.tool_s_per_token:
        capacities_of = [*capacities, *[request.reserved] * (len(members) - size)]
        assignments = tuple(_in_places(request, *each) for each in zip(capacities_of, assignments, strict=True))
    return PlannedCrew(counts=counts, members=members, assignments=assignments, seeding=seeding, makespan_s=makespan_s)


def measured_work_s(request: PlanningRequest) -> float | None:
    """Member-seconds of the last iteration's rollout, by the count of seeding.work_engine_s; None if unknown."""
    start_s = 0.0 if request.reserved is None else request.reserved.start_s
    reach = [pool.start_s for pool in request.pools]
    engines = engines_in_members(request)
    return work_engine_s(request.waits, request.seeding, engines, sum(reach) / max(1, len(reach)), start_s)


def engines_in_members(request: PlanningRequest) -> float:
    """The number of members that decode as many tokens per second as the trainer's engines.

    In RLBoost the number is the number of engines: a remote instance has the accelerators of one engine.
    """
    if request.reserved is None:
        return 0.0
    member = members_rate(request)
    return request.reserved.engines * (_rate(request, request.reserved) / member if member else 1.0)


def members_rate(request: PlanningRequest) -> float:
    """Mean tokens per second of the last iteration's members; 0 if present is no pool."""
    width = dict(request.width)
    rates = [(_rate(request, pool), width.get(pool.name, 0)) for pool in request.pools]
    if not any(count for _, count in rates):
        rates = [(rate, 1) for rate, _ in rates]
    return sum(rate * count for rate, count in rates) / max(1, sum(count for _, count in rates))


def _rate(request: PlanningRequest, capacity: PoolCapacity | TrainerCapacity) -> float:
    """Tokens per second of a member that decodes an even share of the responses with all pools at count_max."""
    everybody = sum(other.count_max for other in request.pools)
    everybody += 0 if request.reserved is None else request.reserved.engines
    responses = len(request.lengths) * request.num_generations
    curve, most = holding(request, capacity)
    return curve.tokens_per_s(min(most, -(-responses // max(1, everybody))))


def seedings(request: PlanningRequest, counts: tuple[int, ...]) -> tuple[SeedingRecord | None, ...]:
    """The seedings to compare beside `counts` members of each pool.

    The trainer's machines may generate for the controller's time, or until nothing is left, or not at all. Without an
    expected member the trainer's machines must generate all. (None,) if the trainer's machines never generate.
    """
    if request.reserved is None or (request.settings.seeding == "off" and any(counts)):
        return (None,)
    pools = request.pools
    present = [pool.expected(count) for pool, count in zip(pools, counts, strict=True)]
    size = sum(present)
    reach = sum(pool.start_s * count for pool, count in zip(pools, present, strict=True))
    controlled = next_seeding(
        request.seeding,
        request.waits,
        members=size,
        engines=engines_in_members(request),
        transfer_s=reach / max(1, size),
        train_s=request.training_s,
        settings=request.settings,
        engine_start_s=request.reserved.start_s,
    )
    # The first time nothing is known that would tell them apart.
    if not size or not request.measured or request.waits is None:
        return (controlled,)
    return tuple({s: replace(controlled, seeding_s=s) for s in (controlled.seeding_s, 0.0, None)}.values())


def ready(pool: PoolCapacity, count: int) -> int:
    """The number of members expected to need no new machine if a plan wants `count` members of the pool."""
    if not pool.kept:
        return 0 if pool.machine_start_s else pool.expected(count)
    return pool.expected(count) if pool.machines_present is None else min(pool.expected(count), pool.machines_present)


def _members(request: PlanningRequest, pool: PoolCapacity, count: int) -> tuple[DispatchMember, ...]:
    curve, most = holding(request, pool)
    at_once = DispatchMember(
        pool=pool.name,
        step_time=curve,
        responses_max=most,
        start_s=pool.start_s,
        usd_per_h=pool.usd_per_h,
    )
    later = replace(at_once, start_s=pool.start_s + pool.machine_start_s)
    present = ready(pool, count)
    return (at_once,) * present + (later,) * (count - present)


def _all_begin(assignments: tuple[Assignment, ...], size: int) -> tuple[Assignment, ...]:
    """Give each of the first `size` members at least one group, so that every member's machine starts."""
    found = list(assignments)
    idle = [place for place in range(size) if not found[place].groups]
    richest_first = [(-len(assignment.groups), place) for place, assignment in enumerate(found)]
    heapq.heapify(richest_first)
    for place in idle:
        groups, richest = richest_first[0]
        if groups < -1:
            heapq.heapreplace(richest_first, (groups + 1, richest))
            *kept, given = found[richest].groups
            found[richest] = replace(found[richest], groups=tuple(kept))
            found[place] = replace(found[place], groups=(given,), ends_s=found[richest].ends_s)
    return tuple(found)


def engines_stop_s(seeding: SeedingRecord, starts_s: Sequence[float], busy_s: float) -> float | None:
    """Seconds until the trainer's engines stop generating; None: the engines generate until nothing is left.

    Args:
        seeding: the seeding of the plan.
        starts_s: seconds until each member of the crew begins. Before the first begins, no member can take over the
            engines' responses (tasks/learning), so the engines go on.
        busy_s: seconds until the trainer's machines may begin to generate.
    """
    if seeding.seeding_s is None or not starts_s:
        return None
    return max(busy_s + seeding.seeding_s, min(starts_s))


def _engine(request: PlanningRequest, reserved: TrainerCapacity) -> DispatchMember:
    """One of the trainer's engines, without a price, because the trainer's machine is paid for in any case."""
    curve, most = holding(request, reserved)
    return DispatchMember(
        pool=TRAIN_POOL,
        step_time=curve,
        responses_max=most,
        start_s=request.trainer_busy_s + reserved.start_s,
    )


def step_time(request: PlanningRequest, capacity: PoolCapacity | TrainerCapacity) -> StepTime:
    """The measured step time; for an unmeasured pool, the step time of the first measured pool or of the trainer."""
    curves = [capacity.step_time, *(other.step_time for other in request.pools)]
    if request.reserved is not None:
        curves.append(request.reserved.step_time)
    return next((curve for curve in curves if curve is not NOMINAL), NOMINAL)


def holding(request: PlanningRequest, capacity: PoolCapacity | TrainerCapacity) -> tuple[StepTime, int]:
    """(step time by the responses that a member holds, the most responses held), with the waiting for tools."""
    responses = len(request.lengths) * request.num_generations
    return while_held(step_time(request, capacity), capacity.responses_max, request.tool_s_per_token, responses)


def _in_places(
    request: PlanningRequest, capacity: PoolCapacity | TrainerCapacity | None, assignment: Assignment
) -> Assignment:
    """The assignment with batch_max as a number of decoded responses instead of held responses."""
    if assignment.batch_max is None or capacity is None:
        return assignment
    curve, most, wait_s = step_time(request, capacity), capacity.responses_max, request.tool_s_per_token
    return replace(assignment, batch_max=decoded_together(curve, most, wait_s, assignment.batch_max))


def _assigned(request: PlanningRequest, members: tuple[DispatchMember, ...]) -> tuple[Assignment, ...]:
    """Groups assigned by length and speed, or without lengths if the settings say so or training ends sooner."""
    if request.settings.dispatch == "in_turn" or not request.knows_lengths:
        return _assigned_alike(request, members)
    by_length = _dispatched(request, members, request.lengths)
    if request.settings.objective == "gpu_seconds" or not request.training_s:
        return by_length
    candidates = [by_length]
    # Among unlike members that is a dispatch of its own, which takes long for many responses.
    if len(set(members)) == 1 or request.responses.size <= MANY_RESPONSES:
        candidates.append(_assigned_alike(request, members))
    return min(candidates, key=lambda assigned: trained_s(request, members, assigned))


def _assigned_alike(request: PlanningRequest, members: tuple[DispatchMember, ...]) -> tuple[Assignment, ...]:
    """Groups assigned in turn if all members are equal or settings.dispatch is "in_turn", and else by speed."""
    kinds = {(member.step_time, member.responses_max, member.start_s) for member in members}
    if len(kinds) == 1 or request.settings.dispatch == "in_turn":
        assigned = assign_groups(len(request.lengths), len(members))
        ends = ends_s(request.responses, assigned, members)
        return tuple(Assignment(groups=g, batch_max=None, ends_s=end) for g, end in zip(assigned, ends, strict=True))
    lengths = request.lengths
    mean, high = (np.full(len(lengths), float(values.mean())) for values in (lengths.expected, lengths.high))
    assigned_alike = _dispatched(request, members, GroupLengths("none", mean, high))
    ends = ends_s(request.responses, [assignment.groups for assignment in assigned_alike], members)
    return tuple(replace(a, ends_s=end if a.groups else 0.0) for a, end in zip(assigned_alike, ends, strict=True))


def _dispatched(
    request: PlanningRequest, members: tuple[DispatchMember, ...], lengths: GroupLengths
) -> tuple[Assignment, ...]:
    return dispatch(
        lengths,
        request.num_generations,
        members,
        request.settings.objective,
        keep_order=request.keep_order,
        length_max=request.length_max,
    ).assignments


def trained_s(request: PlanningRequest, members: Sequence[DispatchMember], assignments: Sequence[Assignment]) -> float:
    """Seconds until the end of training if every member decodes its assigned groups and no other work."""
    lengths = request.responses
    ends: list[npt.NDArray[np.float64]] = []
    groups: list[int] = []
    for member, assignment in zip(members, assignments, strict=True):
        if assignment.groups:
            groups += assignment.groups
            ends.append(group_ends_s(lengths, assignment.groups, member, assignment.batch_max))
    ended_s, tokens = np.concatenate(ends), lengths[groups].sum(axis=1)
    train_s = request.training_s or 0.0
    if request.training == "at_end":
        return float(ended_s.max()) + train_s
    order = np.argsort(groups) if request.training == "in_order" else None
    return streamed_s(ended_s, tokens, train_s - request.publish_s, order) + request.publish_s
