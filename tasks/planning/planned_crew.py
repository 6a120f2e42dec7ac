"""The crew of a plan: its members, and the groups that each begins with. tasks/planning/estimate.py times it."""

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
    """counts: members of each offer, in order. members: these, then the trainer's engines if they generate.

    assignments: one per member. dealt_s: until the last response has ended if no member took work from another.
    """

    counts: tuple[int, ...]
    members: tuple[DispatchMember, ...]
    assignments: tuple[Assignment, ...]
    seeding: SeedingRecord | None
    dealt_s: float

    @property
    def size(self) -> int:
        return sum(self.counts)


def planned_crew(request: PlanningRequest, counts: tuple[int, ...], seeding: SeedingRecord | None) -> PlannedCrew:
    """The crew with these members of each offer and this seeding, and the groups dealt to it.

    Its seconds are meaningful if `request.measured`.
    """
    size = sum(counts)
    offers = [offer for offer, count in zip(request.offers, counts, strict=True) for _ in range(count)]
    crew = [_members(request, offer, count) for offer, count in zip(request.offers, counts, strict=True)]
    members = tuple(chain.from_iterable(crew))
    if seeding is not None and seeding.seeding_s != 0 and request.reserved is not None:
        members += (_engine(request, request.reserved),) * request.reserved.engines
    assignments = _dealt(request, members)
    dealt_s = max(assignment.ends_s for assignment in assignments)
    assignments = _all_begin(assignments, size)
    if request.tool_s_per_token:
        offers_of = [*offers, *[request.reserved] * (len(members) - size)]
        assignments = tuple(_in_places(request, *each) for each in zip(offers_of, assignments, strict=True))
    return PlannedCrew(counts=counts, members=members, assignments=assignments, seeding=seeding, dealt_s=dealt_s)


def measured_work_s(request: PlanningRequest) -> float | None:
    """Member-seconds of the last iteration's rollout, as seeding counts them."""
    start_s = 0.0 if request.reserved is None else request.reserved.start_s
    reach = [offer.start_s for offer in request.offers]
    engines = engines_in_members(request)
    return work_engine_s(request.waits, request.seeding, engines, sum(reach) / max(1, len(reach)), start_s)


def engines_in_members(request: PlanningRequest) -> float:
    """The trainer's engines as a number of members that decode as much.

    In RLBoost both are alike: a remote instance has the accelerators of one engine.
    """
    if request.reserved is None:
        return 0.0
    member = members_rate(request)
    return request.reserved.engines * (_rate(request, request.reserved) / member if member else 1.0)


def members_rate(request: PlanningRequest) -> float:
    """Mean tokens per second of the last iteration's members; 0 if there is no pool."""
    width = dict(request.width)
    rates = [(_rate(request, offer), width.get(offer.pool, 0)) for offer in request.offers]
    if not any(count for _, count in rates):
        rates = [(rate, 1) for rate, _ in rates]
    return sum(rate * count for rate, count in rates) / max(1, sum(count for _, count in rates))


def _rate(request: PlanningRequest, offer: PoolCapacity | TrainerCapacity) -> float:
    """Tokens per second at the batch that each member gets if all members are asked for."""
    everybody = sum(other.count_max for other in request.offers)
    everybody += 0 if request.reserved is None else request.reserved.engines
    responses = len(request.lengths) * request.num_generations
    curve, most = holding(request, offer)
    return curve.tokens_per_s(min(most, -(-responses // max(1, everybody))))


def seedings(request: PlanningRequest, counts: tuple[int, ...]) -> tuple[SeedingRecord | None, ...]:
    """What the trainer's machines may do beside these members, as far as they are expected to come.

    They may generate as long as the controller says, or until nothing is left, or not at all; if no member is expected,
    they must. (None,) if they never generate.
    """
    if request.reserved is None or (request.settings.seeding == "off" and any(counts)):
        return (None,)
    offers = request.offers
    there = [offer.expected(count) for offer, count in zip(offers, counts, strict=True)]
    size = sum(there)
    reach = sum(offer.start_s * count for offer, count in zip(offers, there, strict=True))
    controlled = next_seeding(
        request.seeding,
        request.waits,
        members=size,
        engines=engines_in_members(request),
        transfer_s=reach / max(1, size),
        train_s=request.training_s,
        engine_start_s=request.reserved.start_s,
    )
    # The first time nothing is known that would tell them apart.
    if not size or not request.measured or request.waits is None:
        return (controlled,)
    return tuple({s: replace(controlled, seeding_s=s) for s in (controlled.seeding_s, 0.0, None)}.values())


def ready(offer: PoolCapacity, count: int) -> int:
    """How many of the members asked for are expected to need no new machine."""
    if not offer.kept:
        return 0 if offer.machine_start_s else offer.expected(count)
    return offer.expected(count) if offer.there is None else min(offer.expected(count), offer.there)


def _members(request: PlanningRequest, offer: PoolCapacity, count: int) -> tuple[DispatchMember, ...]:
    curve, most = holding(request, offer)
    at_once = DispatchMember(
        pool=offer.pool,
        step_time=curve,
        responses_max=most,
        start_s=offer.start_s,
        usd_per_h=offer.usd_per_h,
    )
    later = replace(at_once, start_s=offer.start_s + offer.machine_start_s)
    there = ready(offer, count)
    return (at_once,) * there + (later,) * (count - there)


def _all_begin(assignments: tuple[Assignment, ...], size: int) -> tuple[Assignment, ...]:
    """Give each of the first `size` members at least one group, so that its machine is started for this iteration."""
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
    """When the trainer's engines stop generating; None if nothing is left then.

    starts_s: of the crew's members. While none of them lives, the engines cannot hand over (tasks/learning). busy_s:
    when the trainer's machines may begin.
    """
    if seeding.seeding_s is None or not starts_s:
        return None
    return max(busy_s + seeding.seeding_s, min(starts_s))


def _engine(request: PlanningRequest, reserved: TrainerCapacity) -> DispatchMember:
    """One of the trainer's engines; it adds no price, because its machine is paid for in any case."""
    curve, most = holding(request, reserved)
    return DispatchMember(
        pool=TRAIN_POOL,
        step_time=curve,
        responses_max=most,
        start_s=request.trainer_busy_s + reserved.start_s,
    )


def step_time(request: PlanningRequest, offer: PoolCapacity | TrainerCapacity) -> StepTime:
    """The measured step time; for an unmeasured pool, that of the first measured one, members and engines alike."""
    curves = [offer.step_time, *(other.step_time for other in request.offers)]
    if request.reserved is not None:
        curves.append(request.reserved.step_time)
    return next((curve for curve in curves if curve is not NOMINAL), NOMINAL)


def holding(request: PlanningRequest, offer: PoolCapacity | TrainerCapacity) -> tuple[StepTime, int]:
    """(seconds of a token by the responses that a member holds, the most it holds), with their waiting for tools."""
    responses = len(request.lengths) * request.num_generations
    return while_held(step_time(request, offer), offer.responses_max, request.tool_s_per_token, responses)


def _in_places(
    request: PlanningRequest, offer: PoolCapacity | TrainerCapacity | None, assignment: Assignment
) -> Assignment:
    """The assignment with its bound as a number of responses that are decoded, not held."""
    if assignment.batch_max is None or offer is None:
        return assignment
    curve, most, wait_s = step_time(request, offer), offer.responses_max, request.tool_s_per_token
    return replace(assignment, batch_max=decoded_together(curve, most, wait_s, assignment.batch_max))


def _dealt(request: PlanningRequest, members: tuple[DispatchMember, ...]) -> tuple[Assignment, ...]:
    """Groups dealt by length and speed, or as if all were alike if that is asked for or lets training end sooner."""
    if request.settings.dispatch == "in_turn" or not request.knows_lengths:
        return _dealt_alike(request, members)
    by_length = _dispatched(request, members, request.lengths)
    if request.settings.objective == "gpu_seconds" or not request.training_s:
        return by_length
    dealings = [by_length]
    # Among unlike members that is a dispatch of its own, which takes long for many responses.
    if len(set(members)) == 1 or request.responses.size <= MANY_RESPONSES:
        dealings.append(_dealt_alike(request, members))
    return min(dealings, key=lambda dealt: trained_s(request, members, dealt))


def _dealt_alike(request: PlanningRequest, members: tuple[DispatchMember, ...]) -> tuple[Assignment, ...]:
    """Groups dealt in turn if all members are alike, or if that is asked for; else by speed."""
    kinds = {(member.step_time, member.responses_max, member.start_s) for member in members}
    if len(kinds) == 1 or request.settings.dispatch == "in_turn":
        dealt = assign_groups(len(request.lengths), len(members))
        ends = ends_s(request.responses, dealt, members)
        return tuple(Assignment(groups=g, batch_max=None, ends_s=end) for g, end in zip(dealt, ends, strict=True))
    lengths = request.lengths
    mean, high = (np.full(len(lengths), float(values.mean())) for values in (lengths.expected, lengths.high))
    dealt_alike = _dispatched(request, members, GroupLengths("none", mean, high))
    ends = ends_s(request.responses, [assignment.groups for assignment in dealt_alike], members)
    return tuple(replace(a, ends_s=end if a.groups else 0.0) for a, end in zip(dealt_alike, ends, strict=True))


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
    """When training ends, while members generate what they were dealt."""
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
