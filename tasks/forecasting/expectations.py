"""What the planner is told of an iteration's lengths: nothing, the truth, the truth in part, or the epoch before."""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from tasks.planning.offer import GroupLengths

TAIL_SHARE = 0.2
HIGH = 0.9
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
            return GroupLengths("recall", *self._misjudged(iteration, *_by_group(lengths)))
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

    def _misjudged(self, iteration: int, means: Floats, highs: Floats) -> tuple[Floats, Floats]:
        """Some of the longest fifth are told to be like some of the others, and these like them."""
        rng = np.random.default_rng((self._seed, 4, iteration))
        order = np.argsort(-means, kind="stable")
        tail = math.ceil(TAIL_SHARE * len(means))
        missed = min(round((1 - self._recall) * tail), len(means) - tail)
        longest = rng.choice(order[:tail], missed, replace=False)
        others = rng.choice(order[tail:], missed, replace=False)
        source = np.arange(len(means))
        source[longest], source[others] = others, longest
        return means[source], highs[source]


def _overall(lengths: Ints) -> tuple[float, float]:
    mean = float(lengths.mean())
    return mean, max(mean, float(np.quantile(lengths, HIGH)))


def _by_group(lengths: Ints) -> tuple[Floats, Floats]:
    means = lengths.mean(axis=1)
    return means, np.maximum(means, np.quantile(lengths, HIGH, axis=1))
