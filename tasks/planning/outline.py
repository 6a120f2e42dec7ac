"""What an iteration with a given crew is expected to take and to cost, before a group is dealt.

Members move work among themselves until none is idle (tasks/planning/rebalance.py). So all running responses are
assumed to be spread evenly over the members that are there, and to advance together: while `a` responses run on `m`
members, each gets a token every tau(a / m) seconds. This is TailSieve's identity (tasks/planning/makespan.py) for a
crew whose size changes, because members start at different times and the trainer's engines stop when training begins.
With the objective "gpu_seconds" members keep what they were dealt and leave, so batches stay full instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from resources.prices import dollars
from storage.planning_records import SeedingRecord
from tasks.planning.crew import engines_stop_s, holding, ready
from tasks.planning.makespan import drawn_lengths, slot_totals
from tasks.planning.offer import CrewOffer, ReservedOffer
from tasks.planning.rebalance import LATE_RATIO
from tasks.planning.request import PlanningRequest
from tasks.planning.step_time import StepTime

Floats = npt.NDArray[np.float64]
Counts = tuple[int, ...]

# The start of a new machine is shared by this many iterations: the chosen crew usually stays for some time.
HORIZON = 16
# Numbers of running responses at which the pace is computed; between them it is linear.
POINTS = 96
# Responses that stand for all when more wait than are decoded together.
WAITING_TIMED = 512
# Groups of which it is known when they have ended.
GROUPS_TIMED = 512
# How often lengths are drawn, so that their order statistics are means: fewer times for many responses.
DRAWS_MIN, DRAWS_MAX, DRAWN_RESPONSES = 1, 16, 1 << 13
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Outline:
    """An iteration's expected seconds and dollars with these counts of members and this seeding.

    rollout_s: from the plan until the last response has ended. iteration_s: until the next plan; usd_iteration: its
    dollars. machines_s, usd_rollout: of all the crew's members. lasting_s, lasting_usd: the mean of the next HORIZON
    iterations with this crew, in which a new machine starts once. correction: the factor in all of these seconds.
    """

    counts: Counts
    seeding: SeedingRecord | None
    correction: float
    rollout_s: float
    iteration_s: float
    machines_s: float
    usd_rollout: float
    usd_iteration: float
    lasting_s: float
    lasting_usd: float


@dataclass(frozen=True, eq=False, kw_only=True)
class _Part:
    """Members that are alike and decode from start_s to end_s; count: how many are expected to be there."""

    count: float
    step_time: StepTime
    responses_max: int
    start_s: float
    end_s: float
    is_crew: bool


class Outliner:
    """Outlines crews for one request; what does not depend on the crew is computed once."""

    def __init__(self, request: PlanningRequest) -> None:
        self._request = request
        self._totals: dict[int, tuple[Floats, Floats]] = {}

    def outline(self, counts: Counts, seeding: SeedingRecord | None, correction: float = 1.0) -> Outline:
        """The outline of a crew. correction: how many times as long as expected such iterations last."""
        offers, before = self._request.offers, dict(self._request.asked or ())
        there = tuple(ready(offer, count) for offer, count in zip(offers, counts, strict=True))
        rollout_s, work_s, first_s = (correction * each for each in self._times_s(counts, seeding, there))
        settled_s = first_s
        starts_s = [
            offer.machine_start_s
            for offer, count, now in zip(offers, counts, there, strict=True)
            # What was asked for before is on its way.
            if offer.kept and offer.expected(count) > max(now, before.get(offer.pool, 0))
        ]
        settled = tuple(
            offer.expected(count) if offer.kept else now
            for offer, count, now in zip(offers, counts, there, strict=True)
        )
        if there != settled:
            settled_s = correction * self._times_s(counts, seeding, settled)[2]
            if starts_s:
                share = min(1.0, max(1.0, max(starts_s) / first_s) / HORIZON)
                settled_s += share * max(0.0, first_s - settled_s)
        machines_s, usd_rollout = self._paid(counts, work_s, first_s)
        _, usd_lasting = self._paid(counts, work_s, settled_s)
        return Outline(
            counts=counts,
            seeding=seeding,
            correction=correction,
            rollout_s=rollout_s,
            iteration_s=first_s,
            machines_s=machines_s,
            usd_rollout=usd_rollout,
            usd_iteration=usd_rollout + self._usd_beside(first_s),
            lasting_s=settled_s,
            lasting_usd=usd_lasting + self._usd_beside(settled_s),
        )

    def _usd_beside(self, lasting_s: float) -> float:
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

    def _times_s(self, counts: Counts, seeding: SeedingRecord | None, there: Counts) -> tuple[float, float, float]:
        """(until the last response has ended, the mean member's decoding, until the next plan), seconds."""
        request = self._request
        parts = self._parts(counts, seeding, there)
        slots = round(sum(part.count * part.responses_max for part in parts))
        tokens, active = self._work_on(max(1, slots))
        ended_s, busy = self._ended_s(parts, tokens, active)
        rollout_s = float(ended_s[-1])
        size = sum(counts)
        train_s = request.training_s or 0.0
        # Training begins when the trainer's engines have stopped.
        seeded_s = min(rollout_s, max((part.end_s for part in parts if not part.is_crew), default=0.0))
        if request.overlaps:
            # What the crew has generated while the iteration before was trained needs no seeding.
            seeded_s = max(0.0, seeded_s - request.trainer_busy_s)
            lasting_s = max(rollout_s, seeded_s + train_s + request.control_s)
        else:
            begun_s = min(part.start_s for part in parts)
            trained_s = self._trained_s(begun_s, ended_s, tokens, train_s)
            lasting_s = max(trained_s, seeded_s + train_s) + request.control_s
        return rollout_s, busy / size if size else 0.0, lasting_s

    def _parts(self, counts: Counts, seeding: SeedingRecord | None, there: Counts) -> list[_Part]:
        """Who decodes; there: how many members of each offer need no new machine."""
        request, reserved = self._request, self._request.reserved
        parts = []
        for offer, count, now in zip(request.offers, counts, there, strict=True):
            # A lost machine is replaced by one that starts anew; meanwhile the others do its work.
            absent = offer.losses_per_h * (offer.start_s + offer.machine_start_s) / _SECONDS_PER_HOUR
            for members, new_s in ((now, 0.0), (offer.expected(count) - now, offer.machine_start_s)):
                if members > 0:
                    parts.append(self._part(offer, members / (1 + absent), offer.start_s + new_s))
        if not parts and (seeding is None or seeding.seeding_s == 0):
            # None is expected to come, although some are asked for, and no other can do it: as if they came.
            parts = [
                self._part(offer, count, offer.start_s + offer.machine_start_s)
                for offer, count in zip(request.offers, counts, strict=True)
                if count
            ]
        if reserved is not None and seeding is not None and seeding.seeding_s != 0:
            busy_s = request.trainer_busy_s
            stop_s = engines_stop_s(seeding, [part.start_s for part in parts], busy_s)
            end_s = float("inf") if stop_s is None else stop_s
            parts.append(self._part(reserved, reserved.engines, busy_s + reserved.start_s, end_s))
        return parts

    def _part(
        self, offer: CrewOffer | ReservedOffer, count: float, start_s: float, end_s: float = float("inf")
    ) -> _Part:
        curve, most = holding(self._request, offer)
        return _Part(
            count=count,
            step_time=curve,
            responses_max=most,
            start_s=start_s,
            end_s=end_s,
            is_crew=isinstance(offer, CrewOffer),
        )

    @cached_property
    def _drawn(self) -> Floats:
        """[draws, groups, num_generations] lengths: of the last iterations, or, before there are any, expected ones.

        A crew stays for many iterations, whatever the next one's lengths are. Real lengths also have their real tail,
        and as much in common within a group as there is. An iteration counts as a draw, so that of many responses fewer
        iterations are used.
        """
        request = self._request
        responses = len(request.lengths) * request.num_generations
        draws = min(DRAWS_MAX, max(DRAWS_MIN, DRAWN_RESPONSES // responses))
        if request.past:
            return np.stack([seen.lengths for seen in request.past[:draws]])
        return drawn_lengths(request.lengths, request.num_generations, request.length_max, draws)

    @cached_property
    def _sorted(self) -> Floats:
        """The expected lengths of all responses, ascending: means of order statistics over the draws."""
        ordered: Floats = np.sort(self._drawn.reshape(len(self._drawn), -1), axis=1).mean(axis=0)
        return ordered

    def _work_on(self, slots: int) -> tuple[Floats, Floats]:
        """(tokens, active): when each running response has this many tokens, so many still run; tokens ascending.

        A free slot takes the next response if more wait than there are slots; then `tokens` are those of a slot.
        """
        ordered = self._sorted
        responses = len(ordered)
        slots = min(slots, responses)
        if slots not in self._totals:
            each = 1.0
            if slots < responses:
                timed = ordered[:: -(-responses // WAITING_TIMED)]
                kept = max(1, round(slots * len(timed) / responses))
                each = slots / kept
                scale = float(ordered.sum() / timed.sum()) * kept / slots
                # Without knowledge the longest do not come first.
                queue = timed[::-1] if self._request.knows_lengths else np.random.default_rng(0).permutation(timed)
                ordered = np.sort(slot_totals(queue.tolist(), kept)) * scale
            count = len(ordered)
            # Densest among the longest, which decide when the last one ends.
            ranks = np.unique(np.rint(np.geomspace(1, count, POINTS)).astype(int))[::-1]
            self._totals[slots] = ordered[count - ranks], ranks * each
        return self._totals[slots]

    @cached_property
    def _groups(self) -> tuple[Floats, Floats]:
        """(longest response of each group, share of training that is left before it is trained), as training goes."""
        longest, tokens = self._drawn.max(axis=2), self._drawn.sum(axis=2)
        if self._request.training == "in_order":
            until = np.maximum.accumulate(longest, axis=1)
        else:
            order = np.argsort(longest, axis=1)
            until = np.take_along_axis(longest, order, axis=1)
            tokens = np.take_along_axis(tokens, order, axis=1)
        left = np.cumsum(tokens[:, ::-1], axis=1)[:, ::-1] / tokens.sum(axis=1, keepdims=True)
        # Of many groups an even selection stands for all.
        chosen = np.unique(np.linspace(0, len(until[0]) - 1, GROUPS_TIMED).astype(int))
        return until.mean(axis=0)[chosen], left.mean(axis=0)[chosen]

    def _trained_s(self, begun_s: float, ended_s: Floats, tokens: Floats, train_s: float) -> float:
        if self._request.training == "at_end" or not train_s:
            return float(ended_s[-1]) + train_s
        until, left = self._groups
        # If slots take several responses one after another, later groups also wait for their turn.
        until = until + np.linspace(0.0, max(0.0, tokens[-1] - until[-1]), len(until))
        at_s = np.interp(until, np.append(0.0, tokens), np.append(begun_s, ended_s))
        publish_s = self._request.publish_s
        return float((at_s + (train_s - publish_s) * left).max()) + publish_s

    def _ended_s(self, parts: Sequence[_Part], tokens: Floats, active: Floats) -> tuple[Floats, float]:
        """([points] when each running response has that many tokens, member-seconds of the crew's decoding)."""
        ended_s, done, busy = np.zeros(len(tokens)), 0.0, 0.0
        shares: dict[_Part, float] = {}
        for phase, (begin_s, end_s) in _phases(parts):
            shares = _shares(phase, shares, float(np.interp(done, tokens, active)))
            pace, at_work = self._pace(shares, active)
            steps_s = np.diff(np.maximum(tokens, done), prepend=done) * pace
            along_s = np.cumsum(steps_s)
            left_s = end_s - begin_s
            here = (tokens > done) & (along_s <= left_s)
            ended_s[here] = begin_s + along_s[here]
            busy += float(np.diff(np.minimum(along_s, left_s), prepend=0.0) @ at_work)
            if along_s[-1] <= left_s:
                break
            done = float(np.interp(left_s, np.append(0.0, along_s), np.append(done, np.maximum(tokens, done))))
        return ended_s, busy

    def _pace(self, shares: Mapping[_Part, float], active: Floats) -> tuple[Floats, Floats]:
        """([points] seconds per token of each of `active` running responses, [points] the crew's members at work)."""
        crew = sum(part.count for part in shares if part.is_crew)
        leaves = self._request.settings.objective == "gpu_seconds"
        share = active / active[0] if leaves else np.ones_like(active)
        rate = np.zeros_like(active)
        for part, held in shares.items():
            batch = np.minimum(held * active / (part.count * share), part.responses_max)
            table = part.step_time.table(part.responses_max)
            rate += part.count * share * batch / np.interp(np.maximum(1.0, batch), np.arange(len(table)), table)
        return active / rate, crew * share


def _shares(parts: Sequence[_Part], before: Mapping[_Part, float], running: float) -> dict[_Part, float]:
    """The share of the running responses that each part decodes, from now on until parts come or go.

    before: the shares until now. Parts that begin together share evenly. One that comes later gets what waits, and of
    what is decoded only what its holders decode no sooner (tasks/planning/rebalance.py); it is left alone otherwise.
    """
    holders = {part: before[part] for part in parts if before.get(part)}
    held = sum(holders.values())
    if not held:
        members = sum(part.count for part in parts)
        return {part: part.count / members for part in parts}
    shares = {part: share / held for part, share in holders.items()}
    late = [part for part in parts if part not in shares]
    room = sum(part.count * part.responses_max for part in late)
    waiting = running - sum(part.count * part.responses_max for part in holders)
    given = min(room, waiting)
    if given <= 0:
        spare = (part.count * _spare(part, share * running / part.count) for part, share in shares.items())
        given = min(room, sum(spare))
    moved = given / running
    found = {part: share * (1 - moved) for part, share in shares.items()}
    return found | {part: moved * part.count * part.responses_max / room for part in late}


def _spare(part: _Part, batch: float) -> float:
    """How many of a member's `batch` running responses are taken by a member that has none."""
    step_s = part.step_time.step_s
    plateau = part.step_time.plateau(part.responses_max)
    if plateau < batch:
        return min(batch - plateau, batch / 2)
    return batch / 2 if batch >= 2 and step_s(round(batch)) * LATE_RATIO > step_s(round(batch / 2)) else 0.0


def _phases(parts: Sequence[_Part]) -> Iterator[tuple[list[_Part], tuple[float, float]]]:
    """The parts that decode together, and from when to when."""
    times = sorted({time for part in parts for time in (part.start_s, part.end_s)})
    for begin_s, end_s in pairwise(times):
        there = [part for part in parts if part.start_s <= begin_s and part.end_s >= end_s]
        if there:
            yield there, (begin_s, end_s)
