"""The trainable ranker: orders an iteration's prompts by response length (StreamRL, arXiv 2504.15930, section 4.2).

StreamRL trains a small language model on (prompt, observed length), and uses only its order; the policy's own hidden
state of the prompt would serve as well. Here the score is linear in features of the prompt (hashed n-grams of its
tokens, and its dense features): a plan is made on a machine without model or accelerator, and the ranker must follow
the policy in every iteration within milliseconds. It learns only the order, by the pairwise logistic loss (RankNet):
the mean over pairs i, j with L_i > L_j of ln(1 + exp(s_j - s_i)).
"""

import numpy as np
import numpy.typing as npt

from storage.records.length_tables import HASHED
from tasks.planning.prompt_features import PromptFeatures

Floats = npt.NDArray[np.float64]
PASSES = 30
RATE = 0.05
# Factor per iteration on the summed squared gradients, so that steps stay large enough to follow a changing policy.
MEMORY = 0.9
DECAY = 1e-3
# A group is compared with this many others, or with all if there are fewer.
PARTNERS_MAX = 64


def scores(weights: Floats, prompts: PromptFeatures) -> Floats:
    """The score of each prompt [n], from weights [HASHED + FEATURES]; a higher score means longer responses."""
    hashed = np.bincount(prompts.rows, prompts.values * weights[prompts.buckets], minlength=len(prompts))
    total: Floats = hashed + (prompts.dense * weights[HASHED:]).sum(axis=1)
    return total


def trained(weights: Floats, squares: Floats, prompts: PromptFeatures, means: Floats) -> tuple[Floats, Floats]:
    """Weights and summed squared gradients after PASSES steps of AdaGrad on one iteration's groups.

    means: the mean length of each group's responses. Pairs are of this iteration only, because they share a policy.
    Nothing is random: the same input gives the same weights.
    """
    weights, squares = weights * (1 - DECAY), squares * MEMORY
    longer, shorter = _pairs(means)
    if not longer.size:
        return weights, squares
    for _ in range(PASSES):
        score = scores(weights, prompts)
        pull = 1 / (1 + np.exp(np.clip(score[longer] - score[shorter], -50, 50))) / longer.size
        by_group = np.bincount(longer, pull, len(prompts)) - np.bincount(shorter, pull, len(prompts))
        hashed = np.bincount(prompts.buckets, prompts.values * by_group[prompts.rows], HASHED)
        ascent = np.concatenate([hashed, (prompts.dense * by_group[:, None]).sum(axis=0)])
        squares = squares + ascent**2
        weights = weights + RATE * ascent / np.sqrt(squares + 1e-12)
    return weights, squares


def _pairs(means: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(longer, shorter) of pairs of groups with different lengths, [pairs] each.

    Each group is paired with the next PARTNERS_MAX / 2 groups of the plan. Prompts of a plan are shuffled, so the pairs
    are as good as random.
    """
    size = len(means)
    offsets = np.arange(1, min(PARTNERS_MAX, size) // 2 + 1)
    left = np.repeat(np.arange(size), len(offsets))
    right = (left + np.tile(offsets, size)) % size
    differ = means[left] != means[right]
    left, right = left[differ], right[differ]
    swap = means[left] < means[right]
    return np.where(swap, right, left), np.where(swap, left, right)
