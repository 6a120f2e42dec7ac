"""A member's decode rate by batch size, measured while it works, and the batch size beyond which it stays flat."""

from bisect import bisect_left
from itertools import pairwise

STEPS_MIN = 8
SMOOTHING = 0.1
POINTS_MAX = 16
FLAT = 0.95


class DecodeRate:
    """Step times by number of responses in flight, each from moving averages of the steps seen.

    A step decodes one token of each response. An engine may return several tokens of a response at once, or tokens of
    only some responses; the seconds of a call are therefore divided by the tokens of the call.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # seconds and tokens of a call to the engine
        self._steps: dict[int, int] = {}
        self._total_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return self._total_s

    def record(self, batch: int, duration_s: float, tokens: int) -> None:
        """Note a call of `duration_s` seconds that returned `tokens` tokens (0: none yet) of `batch` responses."""
        self._total_s += duration_s
        seen = self._steps.get(batch, 0)
        self._steps[batch] = seen + 1
        weight = max(SMOOTHING, 1 / (seen + 1))
        mean_s, mean_tokens = self._means.get(batch, (0.0, 0.0))
        self._means[batch] = (mean_s + weight * (duration_s - mean_s), mean_tokens + weight * (tokens - mean_tokens))

    def plateau(self) -> int:
        """The smallest batch whose tokens per second are within 5 % of the best; 0 if unknown.

        Known after two batches, the larger at least twice the smaller (RLBoost, arXiv 2510.19225, section 4.2.1, takes
        the plateau from a profile of the previous step).
        """
        known = self._known()
        if not known or max(known) < 2 * min(known):
            return 0
        rates = {batch: batch / step_s for batch, step_s in known.items()}
        enough = FLAT * max(rates.values())
        return min(batch for batch, rate in rates.items() if rate >= enough)

    def points(self) -> tuple[tuple[int, float], ...]:
        """(batch size, seconds of a step), ascending; at most POINTS_MAX points, evenly chosen, both ends included."""
        known = sorted(self._known().items())
        if len(known) <= POINTS_MAX:
            return tuple(known)
        last = len(known) - 1
        return tuple(known[round(index * last / (POINTS_MAX - 1))] for index in range(POINTS_MAX))

    def per_response(self, batch_max: int) -> tuple[float, ...]:
        """Tokens per second of a single response, by batch size from 0 (meaningless) to batch_max; empty if unknown.

        Between measured sizes the nearest size counts, and a step is assumed to grow no faster than its batch.
        """
        known = self._known()
        if not known:
            return ()
        sizes = sorted(known)
        middles = [(low + high) / 2 for low, high in pairwise(sizes)]
        batches = (max(1, batch) for batch in range(batch_max + 1))
        return tuple(_per_response(known, sizes[bisect_left(middles, batch)], batch) for batch in batches)

    def _known(self) -> dict[int, float]:
        means = self._means.items()
        return {b: s * b / tokens for b, (s, tokens) in means if self._steps[b] >= STEPS_MIN and s > 0 and tokens > 0}


def _per_response(known: dict[int, float], nearest: int, batch: int) -> float:
    return 1.0 / (known[nearest] * max(1.0, batch / nearest))
