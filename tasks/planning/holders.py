"""Who decodes how much of an iteration's running responses, as members come and go (tasks/planning/rebalance.py).

Responses that wait go to a member that has room. Running ones stay with their member, unless it is so full that it
decodes no sooner for it. What a member leaves behind when it stops is shared by members that have idled, or else goes
to the first that looks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tasks.planning.rebalance import LATE_RATIO
from tasks.planning.step_time import StepTime


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """Members that are alike and decode from start_s to end_s; count: how many are expected to be there."""

    count: float
    step_time: StepTime
    responses_max: int
    start_s: float
    end_s: float
    is_crew: bool


def phases(parts: Sequence[Part]) -> Iterator[tuple[list[Part], tuple[float, float]]]:
    """The parts that decode together, and from when to when."""
    times = sorted({time for part in parts for time in (part.start_s, part.end_s)})
    for begin_s, end_s in pairwise(times):
        there = [part for part in parts if part.start_s <= begin_s and part.end_s >= end_s]
        if there:
            yield there, (begin_s, end_s)


def shares_of(parts: Sequence[Part], before: Mapping[Part, float], running: float) -> dict[Part, float]:
    """The share of the running responses that each part decodes, from now on until parts come or go.

    before: the shares until now. Parts that begin together share evenly. One that comes later gets what waits, and of
    what is decoded only what its holders decode no sooner; it is left alone otherwise.
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


def fullness(shares: Mapping[Part, float], before: Mapping[Part, float], running: float) -> float:
    """How many times as full as the average member the fullest one is, after others have stopped.

    shares, before: from now on, and until now. Members that have idled share what the others leave behind. Without any
    the member that looks first takes it, as far as it has room, except for what it decodes no sooner for.
    """
    members = sum(part.count for part in shares)
    idle = sum(part.count for part in shares if before.get(part) == 0)
    left = running * sum(share for part, share in before.items() if part not in shares)
    own = max((before.get(part, 0.0) * running / part.count for part in shares), default=0.0)
    first = max(shares, key=lambda part: part.responses_max)
    most = own + min(left, max(0.0, first.responses_max - own))
    most = min(most, max(own, first.step_time.plateau(first.responses_max)))
    if idle:
        most = min(most, max(own, left / idle))
    return max(1.0, min(members, most * members / running)) if left > 0 else 1.0


def _spare(part: Part, batch: float) -> float:
    """How many of a member's `batch` running responses are taken by a member that has none."""
    step_s = part.step_time.step_s
    plateau = part.step_time.plateau(part.responses_max)
    if plateau < batch:
        return min(batch - plateau, batch / 2)
    return batch / 2 if batch >= 2 and step_s(round(batch)) * LATE_RATIO > step_s(round(batch / 2)) else 0.0
