"""The planner's knowledge of an iteration's lengths: nothing, the truth, part of the truth, or the last epoch."""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from tasks.planning.capacity import GroupLengths
from tasks.planning.lengths import ALPHA

TAIL_SHARE = 0.2
HIGH = 0.9
NOISE_MAX, BISECTIONS = 8.0, 30
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Expectations:
    """Expected lengths for the planner; the predictor "history" learns from concluded iterations.

    Args:
        predictor: as in Policy.
        recall: as in Policy.
        seed: seed of the noise of predictor "recall".
    """

    def __init__(self, predictor: Literal["none", "oracle", "history", "recall"], recall: float, seed: int) -> None:
        self._predictor = predictor
        self._recall = recall
        self._seed = seed
        self._overall: tuple[float, float] | None = None
        self._seen: dict[int, tuple[float, float]] = {}

    def expected(self, iteration: int, prompts: Ints, lengths: Ints) -> GroupLengths:
        """Expected lengths for prompts [groups] whose responses will have `lengths` [groups, num_generations].

        Without a concluded iteration, the overall mean and P90 are taken from `lengths`, as from a probe.
        """
        mean, high = self._overall or _overall(lengths)
        if self._predictor == "oracle":
            return GroupLengths("oracle", *_by_group(lengths))
        if self._predictor == "recall":
            return GroupLengths("recall", *self._misjudged(iteration, lengths))
        if self._predictor == "history" and self._seen:
            told = np.array([self._seen.get(int(prompt), (mean, high)) for prompt in prompts])
            return GroupLengths("history", told[:, 0], told[:, 1])
        return GroupLengths("none", np.full(len(lengths), mean), np.full(len(lengths), high))

    def learn(self, prompts: Ints, lengths: Ints) -> None:
        """Learn an iteration's lengths; the last epoch of a prompt counts (RLHFless, arXiv 2602.22718, section 4.3).

        Earlier overall means and P90s fade as in production.
        """
        newest, before = _overall(lengths), self._overall
        weight = 1.0 if before is None else ALPHA
        faded = zip(newest, before or newest, strict=True)
        mean, high = (weight * new + (1 - weight) * old for new, old in faded)
        self._overall = mean, high
        if self._predictor == "history":
            means, highs = _by_group(lengths)
            told = zip(prompts.tolist(), means.tolist(), highs.tolist(), strict=True)
            self._seen.update({prompt: (mean, high) for prompt, mean, high in told})

    def _misjudged(self, iteration: int, lengths: Ints) -> tuple[Floats, Floats]:
        """The true means in a wrong order, with as much noise as leaves the given recall of the longest fifth.

        A ranker gives ranks (StreamRL, arXiv 2504.15930, section 5), and an earlier iteration gives the length of each
        rank. The ratio of true to expected lengths is known, as in production.
        """
        means = lengths.mean(axis=1)
        noise = np.random.default_rng((self._seed, 4, iteration)).standard_normal(len(means))
        low, high = 0.0, NOISE_MAX
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if _recall(means, _reordered(means, noise, middle)) > self._recall else (low, middle)
            )
        told = _reordered(means, noise, low)
        ratio = max(1.0, float(np.quantile(lengths / told[:, None], HIGH)))
        return told, told * ratio


def _reordered(means: Floats, noise: Floats, scale: float) -> Floats:
    told = np.empty_like(means)
    told[np.argsort(np.log(means) + scale * noise, kind="stable")] = np.sort(means)
    return told


def _recall(means: Floats, told: Floats) -> float:
    """The share of the longest fifth that is also the longest fifth by expectation."""
    tail = math.ceil(TAIL_SHARE * len(means))
    longest, expected = (set(np.argsort(-values, kind="stable")[:tail].tolist()) for values in (means, told))
    return len(longest & expected) / tail


def _overall(lengths: Ints) -> tuple[float, float]:
    mean = float(lengths.mean())
    return mean, max(mean, float(np.quantile(lengths, HIGH)))


def _by_group(lengths: Ints) -> tuple[Floats, Floats]:
    means = lengths.mean(axis=1)
    return means, np.maximum(means, np.quantile(lengths, HIGH, axis=1))
