"""What the planner is told of an iteration's lengths: nothing, the truth, the truth in part, or the epoch before."""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from tasks.planning.offer import GroupLengths

TAIL_SHARE = 0.2
HIGH = 0.9
NOISE_MAX, BISECTIONS = 8.0, 30
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Expectations:
    """Learns from iterations that have ended, where the predictor is one that learns."""

    def __init__(self, predictor: Literal["none", "oracle", "history", "recall"], recall: float, seed: int) -> None:
        self._predictor = predictor
        self._recall = recall
        self._seed = seed
        self._overall: tuple[float, float] | None = None
        self._seen: dict[int, tuple[float, float]] = {}

    def expected(self, iteration: int, prompts: Ints, lengths: Ints) -> GroupLengths:
        """For prompts [groups] whose responses will have `lengths` [groups, num_generations].

        Where nothing was learned yet, the overall mean and P90 are those of `lengths`, as a probe would tell them.
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
        """An iteration's lengths; of each prompt the last epoch counts (RLHFless, arXiv 2602.22718, section 4.3)."""
        self._overall = _overall(lengths)
        if self._predictor == "history":
            means, highs = _by_group(lengths)
            told = zip(prompts.tolist(), means.tolist(), highs.tolist(), strict=True)
            self._seen.update({prompt: (mean, high) for prompt, mean, high in told})

    def _misjudged(self, iteration: int, lengths: Ints) -> tuple[Floats, Floats]:
        """Means in a wrong order: by means with so much noise that the given recall of the longest fifth is left.

        Ranks are what a ranker tells (StreamRL, arXiv 2504.15930, section 5), and their lengths those of an earlier
        iteration's ranks. The ratio of what responses have to what was told is known, as it is to production.
        """
        means = lengths.mean(axis=1)
        noise = np.random.default_rng((self._seed, 4, iteration)).standard_normal(len(means))
        low, high = 0.0, NOISE_MAX
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _recall(means, _told(means, noise, middle)) > self._recall else (low, middle)
        told = _told(means, noise, low)
        ratio = max(1.0, float(np.quantile(lengths / told[:, None], HIGH)))
        return told, told * ratio


def _told(means: Floats, noise: Floats, scale: float) -> Floats:
    told = np.empty_like(means)
    told[np.argsort(np.log(means) + scale * noise, kind="stable")] = np.sort(means)
    return told


def _recall(means: Floats, told: Floats) -> float:
    """Share of the longest fifth that is told to be in it."""
    tail = math.ceil(TAIL_SHARE * len(means))
    longest, expected = (set(np.argsort(-values, kind="stable")[:tail].tolist()) for values in (means, told))
    return len(longest & expected) / tail


def _overall(lengths: Ints) -> tuple[float, float]:
    mean = float(lengths.mean())
    return mean, max(mean, float(np.quantile(lengths, HIGH)))


def _by_group(lengths: Ints) -> tuple[Floats, Floats]:
    means = lengths.mean(axis=1)
    return means, np.maximum(means, np.quantile(lengths, HIGH, axis=1))
