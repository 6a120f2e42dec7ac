"""Estimates the seconds and dollars of an iteration with a given crew, before groups are assigned.

The event model of the crew (tasks/crew_model) plays the rollout with the response lengths of the last iterations.
Members on present machines begin at once, members on new machines later, and the trainer's engines stop when training
begins.
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
# How often groups are assigned: each time by the speeds with which the members decode what they got before.
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
    """Seconds of a played iteration.

    Attributes:
        rollout_s: until the last response has ended.
        work_s: work of the mean crew member.
        iteration_s: until the next plan.
    """

    rollout_s: float
    work_s: float
    iteration_s: float


@dataclass(frozen=True)
class _Alike:
    """Members of one pool with equal start and stop.

    Attributes:
        capacity: the pool, or the trainer's machines.
        count: number of members.
        start_s: seconds until the members begin.
        stop_s: seconds until the members stop; None: the members stay.
    """

    capacity: PoolCapacity | TrainerCapacity
    count: int
    start_s: float
    stop_s: float | None = None


class Estimator:
    """Estimates crews for one request; values that do not depend on the crew are computed once.

    Args:
        request: the planner's inputs.
        estimates: approximate number of estimates; many estimates play fewer responses and members each.
    """

    def __init__(self, request: PlanningRequest, estimates: int = 1) -> None:
        self._request = request
        starts = any(pool.kept and pool.machines_present is not None and pool.machine_start_s for pool in request.pools)
        # Where new machines start, a crew is played with them and without.
        rollouts = estimates * (1 + starts)
        self._played_max = min(PLAYED_MAX, PLAYED_MAX * ROLLOUTS_MAX // rollouts)
        self._members_max = MEMBERS_MAX if rollouts <= ROLLOUTS_MAX else MEMBERS_OF_MANY
        self._engines: dict[tuple[str | None, float], EngineModel] = {}

    def estimate(self, counts: Counts, seeding: SeedingRecord | None) -> Estimate:
        """The estimate of a crew. Starts of machines that the newest plan asked for are not charged again."""
        pools, before = self._request.pools, dict(self._request.planned_width or ())
        present = tuple(ready(pool, count) for pool, count in zip(pools, counts, strict=True))
        first = self._times(counts, seeding, present)
        starts_s = [
            pool.machine_start_s
            for pool, count, now in zip(pools, counts, present, strict=True)
            if pool.kept and pool.expected(count) > max(now, before.get(pool.name, 0))
        ]
        settled = tuple(
            pool.expected(count) if pool.kept else now for pool, count, now in zip(pools, counts, present, strict=True)
        )
        lasting_s = first.iteration_s
        if present != settled:
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
        """(machine seconds, dollars) of the crew: kept machines count from plan to plan, others from start to end."""
        machines_s = usd = 0.0
        for pool, count in zip(self._request.pools, counts, strict=True):
            each_s = lasting_s if pool.kept else pool.machine_start_s + pool.start_s + work_s
            machines_s += pool.expected(count) * each_s
            usd += dollars(pool.expected(count) * each_s, pool.usd_per_h)
        return machines_s, usd

    def _times(self, counts: Counts, seeding: SeedingRecord | None, present: Counts) -> _Times:
        """Means over the played iterations; present: members of each pool that need no new machine."""
        members, stop_s = self._members(counts, seeding, present)
        found = []
        for lengths in self._lengths:
            assigned = _assigned(lengths, members, by_length=self._by_length)
            rollout = modelled_rollout(lengths, assigned, self._request.rules)
            crew_s = [each_s for member, each_s in zip(members, rollout.member_s, strict=True) if member.in_crew]
            work_s = sum(crew_s) / len(crew_s) if crew_s else 0.0
            found.append((rollout.ended_s, work_s, self._iteration_s(lengths, rollout, stop_s)))
        rollout_s, work_s, iteration_s = np.mean(found, axis=0).tolist()
        return _Times(rollout_s=rollout_s, work_s=work_s, iteration_s=iteration_s)

    def _iteration_s(self, lengths: Ints, rollout: Rollout, stop_s: float) -> float:
        """Seconds until the next plan; stop_s: seconds until the trainer's engines stop, 0 if no engine generates."""
        request, train_s = self._request, self._request.training_s or 0.0
        # Training begins when the trainer's engines have stopped.
        seeded_s = min(rollout.ended_s, stop_s)
        if request.overlaps:
            # What the crew has generated while the iteration before was trained needs no seeding.
            seeded_s = max(0.0, seeded_s - request.trainer_busy_s)
            return max(rollout.ended_s, seeded_s + train_s + request.control_s)
        return max(self._trained_s(lengths, rollout, train_s), seeded_s + train_s) + request.control_s

    def _trained_s(self, lengths: Ints, rollout: Rollout, train_s: float) -> float:
        """Seconds until the end of training."""
        if self._request.training == "at_end" or not train_s:
            return rollout.ended_s + train_s
        publish_s = self._request.publish_s
        order = np.arange(len(lengths)) if self._request.training == "in_order" else None
        tokens = lengths.sum(axis=1).astype(np.float64)
        return streamed_s(rollout.ends_s, tokens, train_s - publish_s, order) + publish_s

    def _members(
        self, counts: Counts, seeding: SeedingRecord | None, present: Counts
    ) -> tuple[list[PlannedMember], float]:
        """(expected members without groups, seconds until the trainer's engines stop: 0 if no engine runs)."""
        request, reserved = self._request, self._request.reserved
        asked = zip(request.pools, counts, present, strict=True)
        coming = [(pool, now, pool.expected(count) - now) for pool, count, now in asked]
        seeds = reserved is not None and seeding is not None and seeding.seeding_s != 0
        if not any(now or later for _, now, later in coming) and not seeds:
            # No member is expected to come, although some are asked for: as if they came.
            coming = [(pool, 0, count) for pool, count in zip(request.pools, counts, strict=True)]
        alike: list[_Alike] = []
        for pool, now, later in coming:
            alike.append(_Alike(pool, now, pool.start_s))
            alike.append(_Alike(pool, later, pool.start_s + pool.machine_start_s))
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
        """`played` members in place of `alike.count` members; each played response represents `self._each` responses.

        While a lost machine's replacement starts, the remaining members do its work, so every engine is slower by the
        share of lost time.
        """
        capacity, absent = alike.capacity, 0.0
        if isinstance(capacity, PoolCapacity):
            absent = capacity.losses_per_h * (capacity.start_s + capacity.machine_start_s) / _SECONDS_PER_HOUR
        engine = self._engine(capacity, self._each * played * (1 + absent) / alike.count)
        in_crew = isinstance(capacity, PoolCapacity)
        member = PlannedMember(engine=engine, start_s=alike.start_s, stop_s=alike.stop_s, in_crew=in_crew)
        return [member] * played

    def _engine(self, capacity: PoolCapacity | TrainerCapacity, each: float) -> EngineModel:
        """The engine of a member that decodes `each` responses for each played response."""
        key = capacity.name if isinstance(capacity, PoolCapacity) else None, each
        if key not in self._engines:
            curve, most = holding(self._request, capacity)
            prefill = step_time(self._request, capacity).prefill_tokens_per_s(capacity.responses_max)
            self._engines[key] = EngineModel.standing_for(each, curve, most, prefill)
        return self._engines[key]

    @property
    def _by_length(self) -> bool:
        """True if the longest groups are assigned first."""
        return self._request.knows_lengths and self._request.settings.dispatch == "auto"

    @cached_property
    def _each(self) -> float:
        """The number of responses that a played response represents."""
        return len(self._request.lengths) / len(self._lengths[0])

    @cached_property
    def _lengths(self) -> list[Ints]:
        """Response lengths of each played iteration, [groups, num_generations] tokens.

        A crew stays for many iterations, so the lengths are past lengths, not expectations of the next iteration. The
        first iteration has no past and draws lengths from the expectations. Of many groups, every k-th by tokens is
        played.
        """
        request = self._request
        groups, size = len(request.lengths), request.num_generations
        draws = min(ITERATIONS_MAX, max(1, self._played_max // (groups * size)))
        known = request.past_lengths[:draws] or tuple(drawn_lengths(request.lengths, size, request.length_max, draws))
        every = min(-(-groups * size // self._played_max), groups)
        return [_every(np.maximum(1.0, np.rint(lengths)), every).astype(np.int64) for lengths in known]


def _every(lengths: Floats, every: int) -> Floats:
    """Every `every`-th group in the order of tokens, in the order of group numbers, scaled to the mean of `lengths`."""
    if every == 1:
        return lengths
    by_tokens = np.argsort(-lengths.sum(axis=1), kind="stable")
    kept: Floats = lengths[np.sort(by_tokens[::every])]
    return np.asarray(np.maximum(1.0, np.rint(kept * (lengths.mean() / kept.mean()))))


def _assigned(lengths: Ints, members: Sequence[PlannedMember], *, by_length: bool) -> list[PlannedMember]:
    """The members with groups: each next group goes to the member that would be free first.

    by_length: True takes the longest groups first, as with known lengths. False takes groups in the order of group
    numbers and counts the mean length for every group.
    """
    tokens = lengths.sum(axis=1).astype(np.float64)
    order = range(len(lengths))
    if by_length:
        order = np.argsort(-tokens, kind="stable").tolist()
    else:
        tokens[:] = tokens.mean()
    groups_of = [len(lengths) / len(members)] * len(members)
    assigned: list[list[int]] = []
    for _ in range(DEALT_TIMES):
        heap = [(member.start_s, place) for place, member in enumerate(members)]
        heapq.heapify(heap)
        token_s = [
            _token_s(member, groups * lengths.shape[1]) for member, groups in zip(members, groups_of, strict=True)
        ]
        assigned = [[] for _ in members]
        for group in order:
            free_s, place = heap[0]
            assigned[place].append(group)
            heapq.heapreplace(heap, (free_s + float(tokens[group]) * token_s[place], place))
        groups_of = [float(len(groups)) for groups in assigned]
    return [replace(member, groups=tuple(groups)) for member, groups in zip(members, assigned, strict=True)]


def _token_s(member: PlannedMember, responses: float) -> float:
    """Seconds per token if the member decodes so many responses together."""
    batch = max(1, min(member.engine.responses_max, round(responses)))
    return float(member.engine.step_s[batch]) / batch
