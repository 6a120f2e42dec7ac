"""A crew that could be asked for: its members, what each would do, how long it would take and what it would cost.

Width compares such crews, and the chosen one becomes the plan. A member is paid for from the request until its own work
has ended and it leaves: its start counts, and so do its expected losses. The trainer's machines are paid for as long as
the iteration lasts, so a longer iteration costs more of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from resources.prices import dollars
from storage.planning_records import SeedingRecord
from storage.records import TRAIN_POOL
from tasks.planning.dispatch import Assignment, Member, dispatch
from tasks.planning.division import assign_groups
from tasks.planning.locality import decode_s, longest_nearest
from tasks.planning.makespan import ends_s, group_ends_s, long_then_short, streamed_s
from tasks.planning.offer import CrewOffer, GroupLengths, ReservedOffer
from tasks.planning.request import PlanningRequest
from tasks.planning.seeding import next_seeding, work_engine_s
from tasks.planning.step_time import NOMINAL, StepTime

_SECONDS_PER_HOUR = 3600.0
# These shares of a member's groups begin first, as its longest, when its short ones should end early.
LONG_SHARES = (0.1, 0.3)


@dataclass(frozen=True, kw_only=True)
class Crew:
    """counts: members of each offer, in order. members: these, then the trainer's engines if they generate.

    assignments: one per member. rollout_s: until the last response has ended; iteration_s: until training has ended,
    too, as far as its time is known. machines_s: of all the crew's members; usd_rollout: their dollars. usd_iteration:
    with the trainer's machines, if their price is known.
    """

    counts: tuple[int, ...]
    members: tuple[Member, ...]
    assignments: tuple[Assignment, ...]
    seeding: SeedingRecord | None
    rollout_s: float
    iteration_s: float
    machines_s: float
    usd_rollout: float
    usd_iteration: float

    @property
    def size(self) -> int:
        return sum(self.counts)


def planned_crew(request: PlanningRequest, counts: tuple[int, ...]) -> Crew:
    """The crew with these members of each offer, the seeding that suits it, and the groups dealt to it.

    Its seconds and dollars are meaningful if `request.measured`.
    """
    size = sum(counts)
    offers = [offer for offer, count in zip(request.offers, counts, strict=True) for _ in range(count)]
    seeding = planned_seeding(request, counts)
    crew = [(_member(request, offer),) * count for offer, count in zip(request.offers, counts, strict=True)]
    members = tuple(chain.from_iterable(crew))
    if seeding is not None and seeding.seeding_s != 0 and request.reserved is not None:
        members += (_engine(request, request.reserved, seeding.seeding_s),) * request.reserved.engines
    assignments = _dealt(request, members)
    if _knows_lengths(request) and request.settings.dispatch == "auto":
        losses = [offer.losses_per_h for offer in offers] + [0.0] * (len(members) - size)
        same_price = request.settings.objective == "gpu_seconds"
        assignments = longest_nearest(members, assignments, losses, same_price=same_price)
    paid_s = [assignment.ends_s if assignment.groups else 0.0 for assignment in assignments]
    for index, offer in enumerate(offers):
        paid_s[index] += _rework_s(request, offer, members[index], assignments[index])
    usd_rollout = sum(dollars(s, offer.usd_per_h) for s, offer in zip(paid_s, offers, strict=False))
    rollout_s = max(paid_s)
    lasting_s = iteration_s(request, rollout_s, seeding)
    if request.training_s:
        lasting_s = max(lasting_s, trained_s(request, members, assignments))
    return Crew(
        counts=counts,
        members=members,
        assignments=assignments,
        seeding=seeding,
        rollout_s=rollout_s,
        iteration_s=lasting_s,
        machines_s=sum(paid_s[:size]),
        usd_rollout=usd_rollout,
        usd_iteration=usd_rollout + usd_beside(request, lasting_s),
    )


def iteration_s(request: PlanningRequest, rollout_s: float, seeding: SeedingRecord | None) -> float:
    """Seconds of an iteration until everything is generated and trained; training goes on while members generate."""
    before_s = 0.0
    if seeding is not None:
        before_s = rollout_s if seeding.seeding_s is None else min(seeding.seeding_s, rollout_s)
    return max(rollout_s, before_s + (request.training_s or 0.0))


def usd_beside(request: PlanningRequest, lasting_s: float) -> float:
    """Dollars of an iteration of this duration beside its crew: the trainer's machines, and costs without a machine."""
    if request.reserved is None:
        return request.usd_no_machine
    return request.usd_no_machine + dollars(lasting_s, request.reserved.usd_per_h)


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


def slowest_rate(request: PlanningRequest) -> float:
    """Tokens per second of a member of the slowest pool; 0 if there is no pool."""
    return min((_rate(request, offer) for offer in request.offers if offer.count_max), default=0.0)


def _rate(request: PlanningRequest, offer: CrewOffer | ReservedOffer) -> float:
    """Tokens per second at the batch that each member gets if all members are asked for."""
    everybody = sum(other.count_max for other in request.offers)
    everybody += 0 if request.reserved is None else request.reserved.engines
    responses = len(request.lengths) * request.num_generations
    return step_time(request, offer).tokens_per_s(min(offer.responses_max, -(-responses // max(1, everybody))))


def planned_seeding(request: PlanningRequest, counts: tuple[int, ...]) -> SeedingRecord | None:
    """How long the trainer's machines generate beside these members, as far as they are expected to come.

    None if they do not generate.
    """
    if request.reserved is None or (request.settings.seeding == "off" and any(counts)):
        return None
    offers = request.offers
    there = [offer.expected(count) for offer, count in zip(offers, counts, strict=True)]
    size = sum(there)
    reach = sum(offer.start_s * count for offer, count in zip(offers, there, strict=True))
    return next_seeding(
        request.seeding,
        request.waits,
        members=size,
        engines=engines_in_members(request),
        transfer_s=reach / max(1, size),
        train_s=request.training_s,
        settings=request.settings,
        engine_start_s=request.reserved.start_s,
    )


def _member(request: PlanningRequest, offer: CrewOffer) -> Member:
    return Member(
        pool=offer.pool,
        step_time=step_time(request, offer),
        responses_max=offer.responses_max,
        start_s=offer.start_s,
        usd_per_h=offer.usd_per_h,
    )


def _engine(request: PlanningRequest, reserved: ReservedOffer, window_s: float | None) -> Member:
    """One of the trainer's engines; it adds no price, because its machine is paid for in any case."""
    return Member(
        pool=TRAIN_POOL,
        step_time=step_time(request, reserved),
        responses_max=reserved.responses_max,
        start_s=reserved.start_s,
        window_s=window_s,
    )


def step_time(request: PlanningRequest, offer: CrewOffer | ReservedOffer) -> StepTime:
    """The measured step time; for an unmeasured pool, that of the first measured one, members and engines alike."""
    curves = [offer.step_time, *(other.step_time for other in request.offers)]
    if request.reserved is not None:
        curves.append(request.reserved.step_time)
    return next((curve for curve in curves if curve is not NOMINAL), NOMINAL)


def _knows_lengths(request: PlanningRequest) -> bool:
    return request.lengths.predictor != "none"


def _dealt(request: PlanningRequest, members: tuple[Member, ...]) -> tuple[Assignment, ...]:
    """Groups dealt by length and speed, or as if all were alike if that is asked for or lets training end sooner."""
    if request.settings.dispatch == "in_turn" or not _knows_lengths(request):
        return _dealt_alike(request, members)
    by_length = _dispatched(request, members, request.lengths)
    if request.settings.objective == "gpu_seconds" or not request.training_s:
        return by_length
    dealings = [by_length, _dealt_alike(request, members)]
    if not request.keep_order:
        reordered = [_short_early(request, members, by_length, share) for share in LONG_SHARES]
        dealings += [dealt for dealt in reordered if dealt != by_length]
    return min(dealings, key=lambda dealt: trained_s(request, members, dealt))


def _short_early(
    request: PlanningRequest, members: Sequence[Member], dealt: Sequence[Assignment], share: float
) -> tuple[Assignment, ...]:
    """The same dealing in another order, for members with more responses than they decode together."""
    ordered = []
    for member, assignment in zip(members, dealt, strict=True):
        slots = assignment.batch_max or member.responses_max
        if len(assignment.groups) * request.num_generations <= slots:
            ordered.append(assignment)
            continue
        groups = long_then_short(assignment.groups, share)
        (end_s,) = ends_s(request.responses, [groups], [replace(member, responses_max=slots)])
        ordered.append(replace(assignment, groups=groups, ends_s=end_s))
    return tuple(ordered)


def _dealt_alike(request: PlanningRequest, members: tuple[Member, ...]) -> tuple[Assignment, ...]:
    """Groups dealt in turn if all members are alike, or if that is asked for; else by speed."""
    kinds = {(member.step_time, member.responses_max, member.start_s, member.window_s) for member in members}
    if len(kinds) == 1 or request.settings.dispatch == "in_turn":
        dealt = assign_groups(len(request.lengths), len(members))
        ends = ends_s(request.responses, dealt, members)
        return tuple(Assignment(groups=g, batch_max=None, ends_s=end) for g, end in zip(dealt, ends, strict=True))
    lengths = request.lengths
    mean, high = (np.full(len(lengths), float(values.mean())) for values in (lengths.expected, lengths.high))
    dealt_alike = _dispatched(request, members, GroupLengths("none", mean, high))
    ends = ends_s(request.responses, [assignment.groups for assignment in dealt_alike], members)
    return tuple(replace(a, ends_s=end if a.groups else 0.0) for a, end in zip(dealt_alike, ends, strict=True))


def _dispatched(request: PlanningRequest, members: tuple[Member, ...], lengths: GroupLengths) -> tuple[Assignment, ...]:
    return dispatch(
        lengths,
        request.num_generations,
        members,
        request.settings.objective,
        keep_order=request.keep_order,
        length_max=request.length_max,
    ).assignments


def trained_s(request: PlanningRequest, members: Sequence[Member], assignments: Sequence[Assignment]) -> float:
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
    return streamed_s(ended_s, tokens, train_s, order)


def _rework_s(request: PlanningRequest, offer: CrewOffer, member: Member, assignment: Assignment) -> float:
    if not offer.losses_per_h or not assignment.groups:
        return 0.0
    running = min(assignment.batch_max or member.responses_max, len(assignment.groups) * request.num_generations)
    length = float(np.mean(request.lengths.expected[list(assignment.groups)]))
    reprefill_s = running * (length / 2) / member.step_time.tokens_per_s(member.responses_max)
    return rework_s(offer, decode_s(member, assignment), reprefill_s)


def rework_s(offer: CrewOffer, decode_s: float, reprefill_s: float) -> float:
    """Seconds that losses are expected to cost one member: each costs a start, and the running prefixes once more.

    A prefix counts as half a response of mean length, prefilled as fast as a full batch decodes; real engines are
    faster.
    """
    return offer.losses_per_h * decode_s / _SECONDS_PER_HOUR * (offer.start_s + reprefill_s)
