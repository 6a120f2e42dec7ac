"""What members of a group that have ended, or still run, say about those that run."""

from dataclasses import replace

import numpy as np

from tasks.planning.log_normal import HIGH, Floats, spread_of
from tasks.planning.offer import GroupLengths

# Of the variance of ln(length) that a prediction leaves open, the share that a group has in common.
CORRELATION = 0.5
STEPS = 8
_SPREAD_MIN = 0.05
# A logistic distribution of this scale is the nearest to the normal one of deviation 1.
_LOGISTIC = 1 / 1.702


def with_siblings(
    lengths: GroupLengths, finished: Floats, running: Floats | None = None, correlation: float = CORRELATION
) -> GroupLengths:
    """What is expected of the members that have not ended, by what has ended: "siblings".

    Args:
        lengths: what was expected of each group of n.
        finished: [n, members]: tokens of the members that have ended, NaN for the others.
        running: [n, members]: tokens so far of those that run, NaN for the others. Give it whenever it is known:
            who ends first is short, and taken alone would make the group look so.
        correlation: of members of a group, given what was expected, from 0 to 1, both excluded.

    Groups of which nothing has ended or is known to be long stay as they were. ln(length) is normal within a group
    around the group's own mean, which is normal around what was expected; finished lengths are observed, running ones
    bounded from below. The group's mean is the most probable one, by Newton's method; Seer gives each group the
    longest of its finished siblings instead (arXiv 2511.14617, section 4.2). Raises ValueError for a wrong shape.
    """
    if running is None:
        running = np.full(finished.shape, np.nan)
    if finished.ndim != 2 or len(finished) != len(lengths) or running.shape != finished.shape:
        raise ValueError(
            f"finished, running: shapes {finished.shape}, {running.shape}; allowed: ({len(lengths)}, members) each"
        )
    if not 0 < correlation < 1:
        raise ValueError(f"correlation: value {correlation}; allowed: above 0, below 1")
    spread = spread_of(lengths.expected, lengths.high)
    s = np.maximum(spread, _SPREAD_MIN)
    prior = np.log(lengths.expected) - spread**2 / 2
    group_variance, member_variance = correlation * s**2, (1 - correlation) * s**2
    ended, bounded = ~np.isnan(finished), running >= 1
    observed = np.where(ended, np.log(np.where(ended, np.maximum(finished, 1), 1)), 0.0).sum(axis=1)
    bounds = np.log(np.where(bounded, running, 1))
    scale = (np.sqrt(member_variance) * _LOGISTIC)[:, None]
    mean = prior
    for _ in range(STEPS):
        excess, information = _beyond((bounds - mean[:, None]) / scale)
        pulls = np.where(bounded, bounds + scale * excess - mean[:, None], 0.0).sum(axis=1)
        slope = (ended.sum(axis=1) + np.where(bounded, information, 0.0).sum(axis=1)) / member_variance
        gradient = (prior - mean) / group_variance
        gradient = gradient + (observed - ended.sum(axis=1) * mean + pulls) / member_variance
        mean = mean + gradient / (1 / group_variance + slope)
    excess, _ = _beyond((bounds - mean[:, None]) / scale)
    still = np.where(bounded, bounds + scale * excess, 0.0).sum(axis=1) / np.maximum(1, bounded.sum(axis=1))
    centre = np.where(bounded.any(axis=1), still, mean)
    left = np.sqrt(np.maximum(0, spread**2 - group_variance + 1 / (1 / group_variance + slope)))
    changed = ended.any(axis=1) | bounded.any(axis=1)
    expected = np.where(changed, np.exp(centre + left**2 / 2), lengths.expected)
    high = np.where(changed, np.exp(centre + HIGH * left), lengths.high)
    return replace(lengths, predictor="siblings", expected=expected, high=np.maximum(high, expected))


def expected_left(lengths: GroupLengths, finished: Floats, running: Floats) -> Floats:
    """Tokens that are expected to follow what runs: [n, members], NaN where nothing does; as for `with_siblings`."""
    left: Floats = with_siblings(lengths, finished, running).expected[:, None] - running
    return left


def _beyond(u: Floats) -> tuple[Floats, Floats]:
    """Of a standard logistic variable that exceeds u: its mean excess over u, and by how much it knows its centre.

    The excess is (1 + e^u) ln(1 + e^-u), whose derivative is e^u ln(1 + e^-u) - 1; that plus 1 is the second: 0 where
    u is far below (nothing was learned), 1 where it is far above.
    """
    u = np.clip(u, -700.0, 30.0)
    log = np.logaddexp(0.0, -u)
    information: Floats = np.exp(u) * log
    return log + information, information
