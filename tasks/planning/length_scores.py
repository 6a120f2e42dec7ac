"""Scores of a length prediction: how many of the longest groups it found, and how well it had the order."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LONGEST_SHARE = 0.2


def recall_of_longest(expected: npt.ArrayLike, actual: npt.ArrayLike, share: float = LONGEST_SHARE) -> float:
    """Of the k groups expected to be the longest, the share that is at least as long as the k-th longest.

    expected, actual: one figure per group; k is `share` of the groups, rounded, at least one. Groups that tie with the
    k-th longest all count as right. If expectations tie, this is the mean over all orders of the ties: a predictor that
    expects all alike scores what chance scores, k of n if no lengths tie. StreamRL scores its ranker so (arXiv
    2504.15930, section 4.2). Raises ValueError if there are no groups, or a different number of each.
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
