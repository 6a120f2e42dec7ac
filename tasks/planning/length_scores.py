"""Scores of a length prediction: the share of the longest groups found, and the correlation of the order."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LONGEST_SHARE = 0.2


def recall_of_longest(expected: npt.ArrayLike, actual: npt.ArrayLike, share: float = LONGEST_SHARE) -> float:
    """Of the k groups expected to be the longest, the share that is at least as long as the k-th longest.

    The score of StreamRL's ranker (arXiv 2504.15930, section 4.2). Groups that tie with the k-th longest count as
    right. If expectations tie, the score is the mean over all orders of the ties, so a predictor with equal
    expectations scores like chance: k of n if no lengths tie. Raises ValueError without groups, and for arrays of
    different lengths.

    Args:
        expected: expected length of each group, [groups].
        actual: actual length of each group, [groups].
        share: k as a share of the groups, rounded, at least one group.
    """
    wanted, found = _pair(expected, actual)
    k = max(1, round(share * wanted.size))
    right = found >= np.partition(found, -k)[-k]
    threshold = np.partition(wanted, -k)[-k]
    named, ties = wanted > threshold, wanted == threshold
    left = k - named.sum()
    return float((right[named].sum() + left * right[ties].sum() / ties.sum()) / k)


def rank_correlation(expected: npt.ArrayLike, actual: npt.ArrayLike) -> float:
    """Spearman's rank correlation, with ties at their mean rank; 0 if all values of either side are equal.

    Raises what `recall_of_longest` raises.
    """
    sides = [ranks(side) for side in _pair(expected, actual)]
    x, y = (side - side.mean() for side in sides)
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else 0.0


def ranks(values: npt.ArrayLike) -> Floats:
    """The rank of each value from 1, ascending; equal values share their mean rank."""
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Floats = (last - (counts - 1) / 2)[inverse]
    return mean


def _pair(expected: npt.ArrayLike, actual: npt.ArrayLike) -> tuple[Floats, Floats]:
    wanted, found = (np.asarray(side, dtype=np.float64) for side in (expected, actual))
    if wanted.ndim != 1 or wanted.shape != found.shape or not wanted.size:
        raise ValueError(
            f"expected, actual: shapes {wanted.shape}, {found.shape}; allowed: equal, of one group or more"
        )
    return wanted, found
