"""The parts of benchmarks.gpu in a given number of minutes: which begins when, and what is left out.

Parts run in the order of their worth. A part that ends sooner leaves its minutes to the later ones.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gpu.part import Outcome

# A part also begins if this little is missing of its minutes: time passes between two readings of a clock.
_MISSING_MINUTES_MAX = 0.1


@dataclass(frozen=True)
class Turn:
    """A part that begins at a minute, if each part before it takes all of its minutes."""

    part: str
    minutes: float
    begins: float


def turns(minutes: float, parts: Mapping[str, float]) -> list[Turn]:
    """The turns of the parts (name -> most minutes) that fit; a part that does not fit is left out."""
    found: list[Turn] = []
    begins = 0.0
    for part, most in parts.items():
        if begins + most <= minutes:
            found.append(Turn(part, most, begins))
            begins += most
    return found


def lines(minutes: float, parts: Mapping[str, float]) -> Iterator[str]:
    """The schedule in words."""
    fit = turns(minutes, parts)
    yield f"{minutes:g} minutes; a part ends at the latest after:"
    for turn in fit:
        yield f"  {turn.minutes:4.1f} min  {turn.part}, from minute {turn.begins:g}"
    left_out = [part for part in parts if part not in {turn.part for turn in fit}]
    if left_out:
        yield f"  only if others end sooner: {', '.join(left_out)}"


def run_in_turn(
    minutes: float,
    parts: Mapping[str, float],
    run: Callable[[str, float], Outcome],
    tell: Callable[[str, Outcome], None],
    now_s: Callable[[], float] = time.monotonic,
) -> dict[str, Outcome]:
    """Run the parts within these minutes; `tell` gets each outcome at once.

    run: gets a part and the seconds after which it has to end. A part whose minutes are not left, but for some seconds,
    is skipped.
    """
    end_s = now_s() + 60 * minutes
    outcomes = {}
    for part, most in parts.items():
        left = (end_s - now_s()) / 60
        if left < most - _MISSING_MINUTES_MAX:
            outcomes[part] = Outcome("skipped", {}, f"{left:.1f} minutes are left, and it may take {most:g}")
        else:
            outcomes[part] = run(part, 60 * min(most, left))
        tell(part, outcomes[part])
    return outcomes


def chosen(asked: Sequence[str], parts: Mapping[str, float]) -> dict[str, float]:
    """The parts that were asked for, in the order of their worth; all without a wish."""
    return {part: most for part, most in parts.items() if not asked or part in asked or "all" in asked}
