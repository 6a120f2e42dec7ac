"""The result of a width in outline: fast enough to compare many widths before groups are dealt for a few.

Every pool is assumed to work at its rate from its start to a common end. One of its members gets its share of the
responses and is timed exactly. Dealing the groups (tasks/planning/crew.py) takes a hundred times as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from resources.prices import dollars
from storage.planning_records import SeedingRecord
from tasks.planning.crew import iteration_s, planned_seeding, rework_s, step_time, usd_beside
from tasks.planning.makespan import member_time_s
from tasks.planning.offer import CrewOffer
from tasks.planning.request import PlanningRequest
from tasks.planning.step_time import StepTime

# How many ranges of similar lengths are timed, to stand for all, when every member gets one range.
RANGES = 3
# Of a member with more full batches than this, this many are timed; the rest is assumed to decode at its full rate.
BATCHES_TIMED = 8
# Fewer members, with this many times the responses each, are assumed if that ends hardly later (by this factor).
FULLER, LATER = 4, 1.05


@dataclass(frozen=True, kw_only=True)
class Outline:
    """An estimate of what a Crew with these counts would say."""

    counts: tuple[int, ...]
    iteration_s: float
    usd_iteration: float


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Members that are alike, with their rate in tokens per second; offer: None for the trainer's engines."""

    offer: CrewOffer | None
    count: int
    step_time: StepTime
    responses_max: int
    start_s: float
    rate: float


def outline(request: PlanningRequest, counts: tuple[int, ...], lengths: npt.NDArray[np.float64]) -> Outline:
    """The outline for these members of each offer; lengths: of all responses, descending.

    The longest responses are assumed to go to the members that end them first. So the rollout ends when these members
    have ended, when the longest response has ended alone, and when all tokens are decoded.
    """
    seeding = planned_seeding(request, counts)
    parts, tokens = _parts(request, counts, lengths, seeding)
    alone_s = min(part.start_s + float(lengths[0]) * part.step_time.step_s(1) for part in parts)
    end_s = _common_end_s(tokens, parts)
    shares = [part.rate * max(0.0, end_s - part.start_s) / float(lengths.sum()) for part in parts]
    ends = [_ends_s(request, part, lengths, share) for part, share in zip(parts, shares, strict=True)]
    latest_s = min((latest for latest, _ in ends if latest), default=0.0)
    rollout_s = max(alone_s, end_s if len(parts) > 1 else 0.0, latest_s)
    usd = 0.0
    for part, (_, paid_s) in zip(parts, ends, strict=True):
        if part.offer is not None:
            usd += dollars(part.count * min(paid_s, rollout_s), part.offer.usd_per_h)
    lasting_s = iteration_s(request, rollout_s, seeding)
    return Outline(counts=counts, iteration_s=lasting_s, usd_iteration=usd + usd_beside(request, lasting_s))


def _parts(
    request: PlanningRequest,
    counts: tuple[int, ...],
    lengths: npt.NDArray[np.float64],
    seeding: SeedingRecord | None,
) -> tuple[list[_Part], float]:
    """The parts that work, and the tokens left to them after a time-limited seeding."""
    size, tokens, reserved = sum(counts), float(lengths.sum()), request.reserved
    parts = [
        _part(offer, count, step_time(request, offer), offer.responses_max, offer.start_s, len(lengths) / size)
        for offer, count in zip(request.offers, counts, strict=True)
        if count
    ]
    if seeding is not None and reserved is not None:
        batch = len(lengths) / (reserved.engines + size)
        curve = step_time(request, reserved)
        trainer = _part(None, reserved.engines, curve, reserved.responses_max, reserved.start_s, batch)
        if seeding.seeding_s is None:
            parts.append(trainer)
        else:
            generating_s = max(0.0, seeding.seeding_s - reserved.start_s)
            tokens = max(0.0, tokens - trainer.rate * trainer.count * generating_s)
    return parts, tokens


def _part(
    offer: CrewOffer | None, count: int, curve: StepTime, responses_max: int, start_s: float, batch: float
) -> _Part:
    return _Part(
        offer=offer,
        count=count,
        step_time=curve,
        responses_max=responses_max,
        start_s=start_s,
        rate=curve.tokens_per_s(max(1, min(responses_max, round(batch)))),
    )


def _common_end_s(tokens: float, parts: Sequence[_Part]) -> float:
    """When all parts together have decoded the tokens; a part that would start after that does nothing."""
    rate = started = end_s = 0.0
    for part in sorted(parts, key=lambda part: part.start_s):
        if rate and end_s <= part.start_s:
            break
        rate += part.count * part.rate
        started += part.count * part.rate * part.start_s
        end_s = (tokens + started) / rate
    return end_s


def _ends_s(
    request: PlanningRequest, part: _Part, lengths: npt.NDArray[np.float64], share: float
) -> tuple[float, float]:
    """When the last member of a part ends, and the mean paid time; share: each member's share of the tokens."""
    count = min(len(lengths), round(share * len(lengths)))
    if not count:
        return 0.0, 0.0
    if request.settings.objective == "makespan":
        sample = lengths[((np.arange(count) + 0.5) * len(lengths) / count).astype(int)]
        return (_end_s(part, sample, float(lengths.mean())),) * 2
    latest_s, paid_s = _range_ends_s(part, lengths, count)
    fuller = min(len(lengths), FULLER * count)
    if part.count >= FULLER and fuller > count:
        fuller_s, fewer_paid_s = _range_ends_s(part, lengths, fuller)
        if fuller_s <= LATER * latest_s:
            paid_s = min(paid_s, fewer_paid_s * count / fuller)
    return latest_s, paid_s


def _range_ends_s(part: _Part, lengths: npt.NDArray[np.float64], count: int) -> tuple[float, float]:
    """The last and the mean end of members that each get similar lengths."""
    mean = float(lengths.mean())
    firsts = np.linspace(0, len(lengths) - count, RANGES).astype(int)
    ends = [_end_s(part, lengths[first : first + count], mean) for first in firsts]
    return max(ends), sum(ends) / len(ends)


def _end_s(part: _Part, sample: npt.NDArray[np.float64], mean_length: float) -> float:
    timed = sample[:: max(1, len(sample) // (BATCHES_TIMED * part.responses_max))]
    decode_s = member_time_s(timed, part.step_time, part.responses_max)
    decode_s += float(sample.sum() - timed.sum()) / part.step_time.tokens_per_s(part.responses_max)
    if part.offer is None or not part.offer.losses_per_h:
        return part.start_s + decode_s
    running = min(len(sample), part.responses_max)
    reprefill_s = running * (mean_length / 2) / part.step_time.tokens_per_s(part.responses_max)
    return part.start_s + decode_s + rework_s(part.offer, decode_s, reprefill_s)
