"""Step time: seconds of one decode step by the number of responses decoded together, as measured.

Planning and forecasting share the curve as their model of an engine (tau(b) of TailSieve; PTL(BS) of StreamRL, arXiv
2504.15930; TPOT of RLHFless, arXiv 2602.22718). No engine, no clock.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FLAT = 0.95
# Tokens that an engine prefills in the time of a step with one response. The step reads 2 bytes per parameter, and
# a token takes 2 operations per parameter, so the number is the ratio of arithmetic (35 % of the peak are reached) to
# bandwidth (60 %): H100 172, H200 120, A100 (80 GB) 89, L4 235. A small model's step is mostly fixed costs, so small
# models prefill faster (1.5B on H100: three times as fast).
PREFILL_TOKENS = 150


@dataclass(frozen=True, slots=True)
class StepTime:
    """A curve through `points`: (batch, seconds), batches ascending; raises ValueError for invalid points.

    The curve is flat up to the first point, linear between points, and beyond the last point goes on with the last
    slope, or in proportion to the batch after a single point. A step never gets shorter with more responses: of two
    contradicting measurements the longer time counts.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        batches = [batch for batch, _ in self.points]
        if not batches or batches[0] < 1 or any(b <= a for a, b in pairwise(batches)):
            raise ValueError(f"points: batches {batches[:8]}; allowed: at least one, from 1 on, ascending")
        for batch, step_s in self.points:
            if not 0 < step_s < float("inf"):
                raise ValueError(f"points: {step_s} s at a batch of {batch}; allowed: above 0, finite")

    @classmethod
    def linear(cls, fixed_s: float, per_response_s: float) -> "StepTime":
        """The curve fixed_s + batch * per_response_s: memory-bound at first, then bound by arithmetic."""
        return cls(((1, fixed_s + per_response_s), (2, fixed_s + 2 * per_response_s)))

    def step_s(self, batch: int) -> float:
        """Seconds of one step of `batch` responses; 0 for an empty batch."""
        return float(self.table(batch)[batch])

    def table(self, batch_max: int) -> npt.NDArray[np.float64]:
        """Seconds of a step by batch size, from 0 (no time) to batch_max."""
        return _table(self.points, 1 << max(0, batch_max).bit_length())[: batch_max + 1]

    def rises(self, batch_max: int) -> npt.NDArray[np.float64]:
        """The additional seconds of a step with the first, the second, ... and the batch_max-th response."""
        return _rises(self.points, 1 << max(0, batch_max).bit_length())[:batch_max]

    def tokens_per_s(self, batch: int) -> float:
        """Tokens per second of all responses together."""
        return batch / self.step_s(batch) if batch else 0.0

    def prefill_tokens_per_s(self, batch_max: int) -> float:
        """An estimate of prefilled tokens per second, which no engine reports; at least the best decode rate."""
        return max(PREFILL_TOKENS / self.step_s(1), float(self._rates(batch_max).max()))

    def plateau(self, batch_max: int) -> int:
        """The smallest batch up to batch_max whose tokens per second are within 5 % of the best."""
        rates = self._rates(batch_max)
        return int(np.argmax(rates >= FLAT * rates.max())) + 1

    def _rates(self, batch_max: int) -> npt.NDArray[np.float64]:
        """Tokens per second of all responses together, of batches from 1 to batch_max."""
        rates: npt.NDArray[np.float64] = np.arange(1, batch_max + 1) / self.table(batch_max)[1:]
        return rates

    def scaled(self, factor: float) -> "StepTime":
        """The curve of a machine on which every step takes `factor` times as long."""
        return StepTime(tuple((batch, step_s * factor) for batch, step_s in self.points))


# The shape of no real machine, to compare assignments without measurements: a step of 64 takes twice a step of 1.
NOMINAL = StepTime(((1, 0.02), (64, 0.04)))


@lru_cache(maxsize=64)
def _table(points: tuple[tuple[int, float], ...], size: int) -> npt.NDArray[np.float64]:
    batches = np.array([batch for batch, _ in points], dtype=np.float64)
    steps = np.maximum.accumulate([step_s for _, step_s in points])
    wanted = np.arange(size + 1, dtype=np.float64)
    table: npt.NDArray[np.float64] = np.interp(wanted, batches, steps)
    beyond = wanted > batches[-1]
    if len(points) > 1:
        slope = (steps[-1] - steps[-2]) / (batches[-1] - batches[-2])
        table[beyond] = steps[-1] + slope * (wanted[beyond] - batches[-1])
    else:
        table[beyond] = steps[-1] * wanted[beyond] / batches[-1]
    table[0] = 0.0
    table.setflags(write=False)
    return table


@lru_cache(maxsize=64)
def _rises(points: tuple[tuple[int, float], ...], size: int) -> npt.NDArray[np.float64]:
    rises = np.diff(_table(points, size))
    rises.setflags(write=False)
    return rises
