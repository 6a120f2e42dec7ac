"""What an iteration with a given crew is expected to take and to cost, before a group is dealt.

Responses as long as those of the last iterations (tasks/planning/expected_responses.py) are decoded by the members that
are there (tasks/planning/decoding.py). These start at different times, and the trainer's engines stop when training
begins. Members count as evenly full; but while no response waits or moves, they keep what they were dealt, and the
groups of the fullest one end later. How much later follows from the same lengths.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from resources.prices import dollars
from storage.planning_records import SeedingRecord
from tasks.planning.decoding import Decoded, Part, decoded
from tasks.planning.expected_responses import ExpectedResponses
from tasks.planning.makespan import streamed_s
from tasks.planning.offer import CrewOffer, ReservedOffer
from tasks.planning.planned_crew import engines_stop_s, holding, ready, step_time
from tasks.planning.request import PlanningRequest

Floats = npt.NDArray[np.float64]
Counts = tuple[int, ...]

# The start of a new machine is shared by this many iterations: the chosen crew usually stays for some time.
HORIZON = 16
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


class Outliner:
    """Outlines crews for one request; what does not depend on the crew is computed once."""

    def __init__(self, request: PlanningRequest) -> None:
        self._request = request
        self._responses = ExpectedResponses(request)

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
        """(until the last response has ended, from start to end of the mean member, until the next plan), seconds."""
        request = self._request
        parts = self._parts(counts, seeding, there)
        leaves = request.settings.objective == "gpu_seconds"
        expected = self._responses
        found = decoded(expected.queue, parts, weight=expected.weight, unevenness=expected.unevenness, leaves=leaves)
        ended_s = self._ended_s(found)
        rollout_s = float(ended_s.max())
        come = sum(offer.expected(count) for offer, count in zip(request.offers, counts, strict=True))
        train_s = request.training_s or 0.0
        # Training begins when the trainer's engines have stopped.
        seeded_s = min(rollout_s, max((part.end_s for part in parts if not part.is_crew), default=0.0))
        if request.overlaps:
            # What the crew has generated while the iteration before was trained needs no seeding.
            seeded_s = max(0.0, seeded_s - request.trainer_busy_s)
            lasting_s = max(rollout_s, seeded_s + train_s + request.control_s)
        else:
            trained_s = self._trained_s(ended_s, train_s)
            lasting_s = max(trained_s, seeded_s + train_s) + request.control_s
        return rollout_s, found.busy_s / come if come else 0.0, lasting_s

    def _parts(self, counts: Counts, seeding: SeedingRecord | None, there: Counts) -> list[Part]:
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
    ) -> Part:
        curve, most = holding(self._request, offer)
        return Part(
            count=count,
            step_time=curve,
            responses_max=most,
            prefill_tokens_per_s=step_time(self._request, offer).prefill_tokens_per_s(offer.responses_max),
            start_s=start_s,
            end_s=end_s,
            is_crew=isinstance(offer, CrewOffer),
        )

    def _trained_s(self, ended_s: Floats, train_s: float) -> float:
        """When training has ended; ended_s: [groups] when each has."""
        last_s = float(ended_s.max())
        if self._request.training == "at_end" or not train_s:
            return last_s + train_s
        publish_s = self._request.publish_s
        order = np.arange(len(ended_s)) if self._request.training == "in_order" else None
        tokens = self._responses.lengths.sum(axis=1)
        return streamed_s(ended_s, tokens, train_s - publish_s, order) + publish_s

    def _ended_s(self, found: Decoded) -> Floats:
        """[groups] when each has ended; the last member of a part takes longer, and so do its groups."""
        expected = self._responses
        responses_s = np.empty(expected.lengths.size)
        responses_s[expected.order] = found.ends_s
        by_group: Floats = responses_s.reshape(expected.lengths.shape)
        ended_s: Floats = by_group.max(axis=1)
        last = by_group.argmax(axis=1) + by_group.shape[1] * np.arange(len(by_group))
        kept_by = [found.kept_by[place] for place in expected.order.argsort()[last]]
        dealt = dict.fromkeys(part for part in found.kept_by if part is not None)
        uneven = expected.unevenness(list(dealt)) if dealt else 1.0
        for part in (part for part in dealt if part.count >= 2 and part in kept_by):
            groups = np.array([group for group, other in enumerate(kept_by) if other is part])
            latest = groups[np.argsort(ended_s[groups])[-max(1, round(len(groups) / part.count)) :]]
            ended_s[latest] += (uneven - 1) * (ended_s[latest] - part.start_s)
        return ended_s
