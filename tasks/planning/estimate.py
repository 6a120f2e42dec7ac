"""Estimates what an iteration with a given crew takes and costs, before a group is dealt.

The event model of the crew (tasks/crew_model) plays the rollout with responses as long as those of the last iterations.
The members that are there begin at once and new machines later; the trainer's engines stop when training begins.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from resources.prices import dollars
from storage.records.planning_records import SeedingRecord
from tasks.crew_model.crew_member import EngineModel
from tasks.crew_model.rollout_model import PlannedMember, Rollout, modelled_rollout
from tasks.planning.capacity import PoolCapacity, TrainerCapacity
from tasks.planning.makespan import drawn_lengths, streamed_s
from tasks.planning.planned_crew import engines_stop_s, holding, ready, step_time
from tasks.planning.request import PlanningRequest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Counts = tuple[int, ...]

# The start of a new machine is shared by this many iterations: the chosen crew usually stays for some time.
HORIZON = 16
# About so many responses are played: of several iterations if each has few, else each stands for several.
PLAYED_MAX, ITERATIONS_MAX = 400, 8
# Of more members than this, each stands for several, too: with twice as many, looks for work take four times as long.
MEMBERS_MAX = 24
# Where more rollouts than this are played for a plan, each has fewer responses, and at most so many members.
ROLLOUTS_MAX, MEMBERS_OF_MANY = 24, 12
# How often groups are dealt: each time by the speeds with which the members decode what they got before.
DEALT_TIMES = 3
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The expected seconds and dollars of an iteration.

    Attributes:
        counts: members of each pool.
        seeding: what the trainer's machines generate.
        rollout_s: from the plan until the last response has ended.
        iteration_s: from the plan until the next plan.
        machines_s: machine seconds of all the crew's members.
        usd_rollout: dollars of all the crew's members.
        usd_iteration: dollars of the iteration.
        lasting_s: mean seconds of the next HORIZON iterations with this crew, in which a new machine starts once.
        lasting_usd: mean dollars of the next HORIZON iterations with this crew.
    """

    counts: Counts
    seeding: SeedingRecord | None
    rollout_s: float
    iteration_s: float
    machines_s: float
    usd_rollout: float
    usd_iteration: float
    lasting_s: float
    lasting_usd: float


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Seconds: until the last response has ended, of the mean member's work, and until the next plan."""

    rollout_s: float
    work_s: float
    iteration_s: float


@dataclass(frozen=True)
class _Alike:
    """Members of one offer that begin and stop together."""

    offer: PoolCapacity | TrainerCapacity
    count: int
    start_s: float
    stop_s: float | None = None


class Estimator:
    """Estimates crews for one request; what does not depend on the crew is computed once.

    estimates: about how many are asked for.
    """

    def __init__(self, request: PlanningRequest, estimates: int = 1) -> None:
        self._request = request
        starts = any(offer.kept and offer.there is not None and offer.machine_start_s for offer in request.offers)
        # Where new machines start, a crew is played with them and without.
        rollouts = estimates * (1 + starts)
        self._played_max = min(PLAYED_MAX, PLAYED_MAX * ROLLOUTS_MAX // rollouts)
        self._members_max = MEMBERS_MAX if rollouts <= ROLLOUTS_MAX else MEMBERS_OF_MANY
        self._engines: dict[tuple[str | None, float], EngineModel] = {}

    def estimate(self, counts: Counts, seeding: SeedingRecord | None) -> Estimate:
        """The estimate of a crew. A machine that was asked for before is on its way, so its start is not new."""
        offers, before = self._request.offers, dict(self._request.asked or ())
        there = tuple(ready(offer, count) for offer, count in zip(offers, counts, strict=True))
        first = self._times(counts, seeding, there)
        starts_s = [
            offer.machine_start_s
            for offer, count, now in zip(offers, counts, there, strict=True)
            if offer.kept and offer.expected(count) > max(now, before.get(offer.pool, 0))
        ]
        settled = tuple(
            offer.expected(count) if offer.kept else now
            for offer, count, now in zip(offers, counts, there, strict=True)
        )
        lasting_s = first.iteration_s
        if there != settled:
            lasting_s = self._times(counts, seeding, settled).iteration_s
            if starts_s:
                share = min(1.0, max(1.0, max(starts_s) / first.iteration_s) / HORIZON)
                lasting_s += share * max(0.0, first.iteration_s - lasting_s)
        machines_s, usd_rollout = self._paid(counts, first.work_s, first.iteration_s)
        _, usd_lasting = self._paid(counts, first.work_s, lasting_s)
        return Estimate(
            counts=counts,
            seeding=seeding,
            rollout_s=first.rollout_s,
            iteration_s=first.iteration_s,
            machines_s=machines_s,
            usd_rollout=usd_rollout,
            usd_iteration=usd_rollout + self._usd_beside(first.iteration_s),
            lasting_s=lasting_s,
            lasting_usd=usd_lasting + self._usd_beside(lasting_s),
        )

    def _usd_beside(self, lasting_s: float) -> float:
        """Dollars of an iteration beside its crew."""
        reserved = self._request.reserved
        trainer = 0.0 if reserved is None else dollars(lasting_s, reserved.usd_per_h)
        return self._request.usd_no_machine + trainer

    def _paid(self, counts: Counts, work_s: float, lasting_s: float) -> tuple[float, float]:
        """Machine seconds of the crew, and their dollars: of a kept machine from plan to plan, else while it works."""
        machines_s = usd = 0.0
        for offer, count in zip(self._request.offers, counts, strict=True):
            each_s = lasting_s if offer.kept else offer.machine_start_s + offer.start_s + work_s
            machines_s += offer.expected(count) * each_s
            usd += dollars(offer.expected(count) * each_s, offer.usd_per_h)
        return machines_s, usd

    def _times(self, counts: Counts, seeding: SeedingRecord | None, there: Counts) -> _Times:
        """Means over the played iterations; there: how many members of each offer need no new machine."""
        members, stop_s = self._members(counts, seeding, there)
        found = []
        for lengths in self._lengths:
            dealt = _dealt(lengths, members, by_length=self._by_length)
            rollout = modelled_rollout(lengths, dealt, self._request.rules)
            crew_s = [each_s for member, each_s in zip(members, rollout.member_s, strict=True) if member.in_crew]
            work_s = sum(crew_s) / len(crew_s) if crew_s else 0.0
            found.append((rollout.ended_s, work_s, self._iteration_s(lengths, rollout, stop_s)))
        rollout_s, work_s, iteration_s = np.mean(found, axis=0).tolist()
        return _Times(rollout_s=rollout_s, work_s=work_s, iteration_s=iteration_s)

    def _iteration_s(self, lengths: Ints, rollout: Rollout, stop_s: float) -> float:
        """When the next plan is made; stop_s: when the trainer's engines stop, 0 if they do not generate."""
        request, train_s = self._request, self._request.training_s or 0.0
        # Training begins when the trainer's engines have stopped.
        seeded_s = min(rollout.ended_s, stop_s)
        if request.overlaps:
            # What the crew has generated while the iteration before was trained needs no seeding.
            seeded_s = max(0.0, seeded_s - request.trainer_busy_s)
            return max(rollout.ended_s, seeded_s + train_s + request.control_s)
        return max(self._trained_s(lengths, rollout, train_s), seeded_s + train_s) + request.control_s

    def _trained_s(self, lengths: Ints, rollout: Rollout, train_s: float) -> float:
        """When training has ended."""
        if self._request.training == "at_end" or not train_s:
            return rollout.ended_s + train_s
        publish_s = self._request.publish_s
        order = np.arange(len(lengths)) if self._request.training == "in_order" else None
        tokens = lengths.sum(axis=1).astype(np.float64)
        return streamed_s(rollout.ends_s, tokens, train_s - publish_s, order) + publish_s

    def _members(
        self, counts: Counts, seeding: SeedingRecord | None, there: Counts
    ) -> tuple[list[PlannedMember], float]:
        """(the members that are expected, without groups; when the trainer's engines stop, 0 if they do not run)."""
        request, reserved = self._request, self._request.reserved
        asked = zip(request.offers, counts, there, strict=True)
        coming = [(offer, now, offer.expected(count) - now) for offer, count, now in asked]
        seeds = reserved is not None and seeding is not None and seeding.seeding_s != 0
        if not any(now or later for _, now, later in coming) and not seeds:
            # No member is expected to come, although some are asked for: as if they came.
            coming = [(offer, 0, count) for offer, count in zip(request.offers, counts, strict=True)]
        alike: list[_Alike] = []
        for offer, now, later in coming:
            alike.append(_Alike(offer, now, offer.start_s))
            alike.append(_Alike(offer, later, offer.start_s + offer.machine_start_s))
        stop_s: float | None = 0.0
        if reserved is not None and seeding is not None and seeds:
            busy_s = request.trainer_busy_s
            stop_s = engines_stop_s(seeding, [part.start_s for part in alike if part.count], busy_s)
            alike.append(_Alike(reserved, reserved.engines, busy_s + reserved.start_s, stop_s))
        alike = [part for part in alike if part.count and (part.stop_s is None or part.start_s < part.stop_s)]
        share = min(1.0, self._members_max / max(1, sum(part.count for part in alike)))
        members = [member for part in alike for member in self._played(part, max(1, round(part.count * share)))]
        return members, math.inf if stop_s is None else stop_s

    def _played(self, alike: _Alike, played: int) -> list[PlannedMember]:
        """So many members that stand for these; each response that is played stands for `self._each`.

        A lost machine is replaced by one that starts anew; meanwhile the others do its work.
        """
        offer, absent = alike.offer, 0.0
        if isinstance(offer, PoolCapacity):
            absent = offer.losses_per_h * (offer.start_s + offer.machine_start_s) / _SECONDS_PER_HOUR
        engine = self._engine(offer, self._each * played * (1 + absent) / alike.count)
        in_crew = isinstance(offer, PoolCapacity)
        member = PlannedMember(engine=engine, start_s=alike.start_s, stop_s=alike.stop_s, in_crew=in_crew)
        return [member] * played

    def _engine(self, offer: PoolCapacity | TrainerCapacity, each: float) -> EngineModel:
        """The engine of a member that decodes `each` responses for each one that is played."""
        key = offer.pool if isinstance(offer, PoolCapacity) else None, each
        if key not in self._engines:
            curve, most = holding(self._request, offer)
            prefill = step_time(self._request, offer).prefill_tokens_per_s(offer.responses_max)
            self._engines[key] = EngineModel.standing_for(each, curve, most, prefill)
        return self._engines[key]

    @property
    def _by_length(self) -> bool:
        """Whether the longest groups are dealt first."""
        return self._request.knows_lengths and self._request.settings.dispatch == "auto"

    @cached_property
    def _each(self) -> float:
        """How many responses each one stands for that is played."""
        return len(self._request.lengths) / len(self._lengths[0])

    @cached_property
    def _lengths(self) -> list[Ints]:
        """[groups, num_generations] tokens of each iteration that is played.

        They are the last iterations', whatever is expected of the next one, because a crew stays for many iterations;
        before there are any, they are drawn from what is expected. Of many groups, every k-th by tokens is played.
        """
        request = self._request
        groups, size = len(request.lengths), request.num_generations
        draws = min(ITERATIONS_MAX, max(1, self._played_max // (groups * size)))
        known = request.past[:draws] or tuple(drawn_lengths(request.lengths, size, request.length_max, draws))
        every = min(-(-groups * size // self._played_max), groups)
        return [_every(np.maximum(1.0, np.rint(lengths)), every).astype(np.int64) for lengths in known]


def _every(lengths: Floats, every: int) -> Floats:
    """One of each `every` groups that follow each other by tokens, in their own order, with the same mean length."""
    if every == 1:
        return lengths
    by_tokens = np.argsort(-lengths.sum(axis=1), kind="stable")
    kept: Floats = lengths[np.sort(by_tokens[::every])]
    return np.asarray(np.maximum(1.0, np.rint(kept * (lengths.mean() / kept.mean()))))


def _dealt(lengths: Ints, members: Sequence[PlannedMember], *, by_length: bool) -> list[PlannedMember]:
    """The members with groups: each next group goes to the member that would be free first.

    by_length: the longest groups first, as if their lengths were known; else all count alike, in the order of their
    numbers.
    """
    tokens = lengths.sum(axis=1).astype(np.float64)
    order = range(len(lengths))
    if by_length:
        order = np.argsort(-tokens, kind="stable").tolist()
    else:
        tokens[:] = tokens.mean()
    groups_of = [len(lengths) / len(members)] * len(members)
    dealt: list[list[int]] = []
    for _ in range(DEALT_TIMES):
        heap = [(member.start_s, place) for place, member in enumerate(members)]
        heapq.heapify(heap)
        token_s = [
            _token_s(member, groups * lengths.shape[1]) for member, groups in zip(members, groups_of, strict=True)
        ]
        dealt = [[] for _ in members]
        for group in order:
            free_s, place = heap[0]
            dealt[place].append(group)
            heapq.heapreplace(heap, (free_s + float(tokens[group]) * token_s[place], place))
        groups_of = [float(len(groups)) for groups in dealt]
    return [replace(member, groups=tuple(groups)) for member, groups in zip(members, dealt, strict=True)]


def _token_s(member: PlannedMember, responses: float) -> float:
    """Seconds per token if the member decodes so many responses together."""
    batch = max(1, min(member.engine.responses_max, round(responses)))
    return float(member.engine.step_s[batch]) / batch
