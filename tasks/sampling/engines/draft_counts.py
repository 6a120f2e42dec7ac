"""The number of drafts that pays: from the share of right drafts and the engine's own step times by fed tokens.

With n responses and k drafts for each, a step feeds n * (k + 1) tokens, takes tau of that, and gives
n * (1 - p^(k + 1)) / (1 - p) tokens, if a draft behind right ones is right with probability p. The best k maximises
tokens per second; it is 0 where the step is bound by arithmetic, or where drafts are wrong. A drafter that computes
adds k times the seconds of a draft to the step.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from tasks.sampling.engines.drafter import WIDTHS

# Step times are uncertain by a few per cent, so drafts for less gain are not worth their risk.
_GAIN_MIN = 1.03
# A response's share begins as the share of all responses, which counts like this many drafts.
_PRIOR = 4.0
# Of each earlier draft, what counts less with each further one: about the last 20 of a response, the last 1000 of all.
_DECAY_OF_RESPONSE, _DECAY_OF_ALL = 0.95, 0.999
# A time counts until this many steps later, so that a wrong one is tried again.
_LASTS_STEPS = 2048
_KEPT = 5
# What a larger step than any measured is thought to take: a power of its size between flat and proportional, so that
# it is tried where it may pay.
_GROWTH = 0.25
# A coarse clock may stand still in a step; rates divide by a step's seconds.
_SECONDS_MIN = 1e-9


def expected_tokens(share: float, drafts: int) -> float:
    """The mean number of tokens that a response gets from a step with this many drafts, each right with this share."""
    if share >= 1.0:
        return drafts + 1.0
    return float((1.0 - share ** (drafts + 1)) / (1.0 - share))


def best_drafts(
    responses: int,
    tokens: Callable[[int], float],
    step_s: Callable[[int], float],
    choices: Iterable[int],
    draft_s: float = 0.0,
) -> int:
    """The number of drafts per response with the most tokens per second, the smallest if several have it; 0 is one.

    Args:
        responses: the number of responses in flight.
        tokens: the mean number of tokens that a step with so many drafts per response gives.
        step_s: seconds of a step that feeds a number of tokens.
        choices: the numbers to choose from, in rising order.
        draft_s: seconds that each draft of all responses takes before the step.
    """
    best, best_rate = 0, _GAIN_MIN * responses / step_s(responses)
    for drafts in choices:
        rate = tokens(drafts) / (step_s(responses * (drafts + 1)) + drafts * draft_s)
        if rate > best_rate:
            best, best_rate = drafts, rate
    return best


class StepTimes:
    """Seconds of a step by the number of tokens that it feeds, as measured lately."""

    def __init__(self) -> None:
        self._steps = 0
        self._seen: set[tuple[int, int]] = set()
        self._measured: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}

    def measured(self, responses: int, width: int, seconds: float) -> None:
        """A step of this many responses and tokens per response took so long; the first of a shape warms it up."""
        self._steps += 1
        if (responses, width) not in self._seen:
            self._seen.add((responses, width))
            return
        size = _size(responses * width)
        self._measured.setdefault(size, deque(maxlen=_KEPT)).append(max(seconds, _SECONDS_MIN))
        self._last[size] = self._steps

    def knows(self, tokens: int) -> bool:
        """Whether a step of so many tokens, or of more, was measured lately."""
        return any(size >= _size(tokens) for size in self._sizes())

    def __call__(self, tokens: int) -> float:
        """Seconds of a step that feeds so many tokens: between measured sizes in proportion.

        A step below the measured sizes counts as short as it can be: where drafts would pay only beside a longer plain
        step, the engine takes the plain step and measures its time. A guess that is too long would stand for ever,
        because no engine would take the step.
        """
        sizes = self._sizes()
        if not sizes:
            return 1.0
        wanted = _size(tokens)
        place = bisect_left(sizes, wanted)
        if place == len(sizes):
            return self._middle(sizes[-1]) * float((tokens / _tokens(sizes[-1])) ** _GROWTH)
        above = sizes[place]
        if above == wanted:
            return self._middle(above)
        if place == 0:
            return _least_s([_tokens(size) for size in sizes], [self._middle(size) for size in sizes], tokens)
        low, high = _tokens(sizes[place - 1]), _tokens(above)
        part = (tokens - low) / (high - low)
        return self._middle(sizes[place - 1]) * (1 - part) + self._middle(above) * part

    def between(self, tokens: int) -> float | None:
        """Seconds of a step that feeds so many tokens, by all times so far; None outside of the measured sizes."""
        fed, seconds = self._all_times()
        if not fed or not _size(fed[0]) <= _size(tokens) <= _size(fed[-1]):
            return None
        return float(np.interp(tokens, fed, seconds))

    def outside(self, tokens: int) -> float | None:
        """Seconds that a step outside of the measured sizes takes at least; None without two sizes for a smaller one.

        No larger step is shorter.
        """
        fed, seconds = self._all_times()
        if fed and tokens > fed[-1]:
            return max(seconds)
        return _least_s(fed, seconds, tokens) if len(fed) > 1 else None

    def _all_times(self) -> tuple[list[float], list[float]]:
        """Tokens fed, ascending, and seconds; old times, too."""
        sizes = sorted(self._measured)
        return [_tokens(size) for size in sizes], [self._middle(size) for size in sizes]

    def _sizes(self) -> list[int]:
        return sorted(size for size, last in self._last.items() if self._steps - last <= _LASTS_STEPS)

    def _middle(self, size: int) -> float:
        times = sorted(self._measured[size])
        return times[(len(times) - 1) // 2]


class DraftCounts:
    """Measures an engine's steps and drafts, and chooses the next number of drafts."""

    def __init__(self, *, computes: bool = False) -> None:
        """computes: whether drafts take seconds of their own, which `computed` tells."""
        self.times = StepTimes()
        self._draft_times = StepTimes() if computes else None
        self._right = self._compared = 0.0
        self._of_response: dict[int, tuple[float, float]] = {}

    @property
    def knows_drafts(self) -> bool:
        """Whether the seconds of a draft are known, if there are any."""
        return self._draft_times is None or self._draft_times.knows(1)

    def share(self, response: int) -> float:
        """The share of right drafts of a response, drawn to that of all; 0 until one was right."""
        of_all = self._right / (self._compared + _PRIOR)
        right, compared = self._of_response.get(response, (0.0, 0.0))
        return (right + _PRIOR * of_all) / (compared + _PRIOR)

    def worth_asking(self, responses: int) -> bool:
        """Whether drafts would pay if every response had as many as are verified."""
        return self.worth(responses) > 0

    def worth(self, responses: int) -> int:
        """How many drafts would pay if every response had as many as are verified."""
        share = self._right / (self._compared + _PRIOR)
        return self._best(responses, lambda drafts: responses * expected_tokens(share, drafts))

    def best(self, lengths: Mapping[int, int]) -> int:
        """How many drafts to verify, given how many there are for each response in flight."""
        pairs = [(self.share(response), length) for response, length in lengths.items() if length]

        def tokens(drafts: int) -> float:
            drafted = sum(expected_tokens(share, min(drafts, length)) for share, length in pairs)
            return drafted + len(lengths) - len(pairs)

        return self._best(len(lengths), tokens) if pairs else 0

    def took(self, responses: int, width: int, seconds: float, tokens: int) -> float:
        """A step that fed `width` tokens for each response took so long, without drafting, and gave these tokens.

        Returns the seconds that its drafts have saved, by the times measured lately.
        """
        self.times.measured(responses, width, seconds)
        if width == 1:
            return 0.0
        drafting_s = (width - 1) * self._draft_s(responses)
        return self.times(responses) * tokens / responses - self.times(responses * width) - drafting_s

    def computed(self, responses: int, pass_s: float) -> None:
        """A draft of each of so many responses took so long to compute."""
        if self._draft_times is not None:
            self._draft_times.measured(responses, 1, pass_s)

    def drafted(self, response: int, right: int, compared: int) -> None:
        """Of a response's drafts `compared` were compared with its tokens, and the first `right` were right."""
        if not compared:
            return
        kept = _DECAY_OF_ALL**compared
        self._right, self._compared = self._right * kept + right, self._compared * kept + compared
        old_right, old_compared = self._of_response.get(response, (0.0, 0.0))
        kept = _DECAY_OF_RESPONSE**compared
        self._of_response[response] = (old_right * kept + right, old_compared * kept + compared)

    def leave(self, responses: Iterable[int]) -> None:
        """These responses are in flight no more."""
        for response in responses:
            self._of_response.pop(response, None)

    def _best(self, responses: int, tokens: Callable[[int], float]) -> int:
        if not self._right:
            return 0
        # A number is tried only once the next smaller one was measured: a full batch then loses little by trying.
        choices = (width - 1 for smaller, width in pairwise(WIDTHS) if self.times.knows(responses * smaller))
        return best_drafts(responses, tokens, self.times, choices, self._draft_s(responses))

    def _draft_s(self, responses: int) -> float:
        """Seconds of a draft of each response; a second while nothing is measured."""
        return 0.0 if self._draft_times is None else self._draft_times(responses)


def _least_s(fed: Sequence[float], seconds: Sequence[float], tokens: int) -> float:
    """Seconds that a step below the measured sizes (ascending) takes at least: never 0, and no more than any of them.

    Times are convex in the tokens fed, so the line through the smallest and the largest size is not above them.
    """
    least_s = seconds[0] * tokens / fed[0]
    if len(fed) > 1:
        least_s = max(least_s, seconds[0] - (seconds[-1] - seconds[0]) / (fed[-1] - fed[0]) * (fed[0] - tokens))
    return min(least_s, *seconds)


def _size(tokens: float) -> int:
    """Sizes a quarter of an octave apart."""
    return round(4 * math.log2(tokens))


def _tokens(size: int) -> float:
    return float(2 ** (size / 4))
