"""Lengths of a group's running responses, predicted from its responses that have ended or still run."""

from dataclasses import replace

import numpy as np

from tasks.planning.log_normal import HIGH, Floats, spread_of
from tasks.planning.offer import GroupLengths

# The share of the unexplained variance of ln(length) that a group's responses have in common.
CORRELATION = 0.5
STEPS = 8
_SPREAD_MIN = 0.05
# The scale of the logistic distribution that is nearest to the normal one of deviation 1.
_LOGISTIC = 1 / 1.702


def with_siblings(
    lengths: GroupLengths, finished: Floats, running: Floats | None = None, correlation: float = CORRELATION
) -> GroupLengths:
    """The lengths expected of the responses that have not ended, given those that have: predictor "siblings".

    Args:
        lengths: what was expected of each of n groups.
        finished: [n, samples]: tokens of the responses that have ended, NaN for the others.
        running: [n, samples]: tokens so far of those that run, NaN for the others. Give it if it is known: the
            responses that end first are short, and alone they would make the group look short.
        correlation: of a group's responses, given what was expected, between 0 and 1 (exclusive).

    A group stays as it was if none of its responses has ended or is known to be long. ln(length) is normal within a
    group around the group's own mean, which is normal around what was expected. Finished lengths are observed, running
    ones bounded from below. The group's mean is the most probable one, by Newton's method; Seer instead gives each
    group the longest of its finished siblings (arXiv 2511.14617, section 4.2). Raises ValueError for a wrong shape.
    """
    if running is None:
        running = np.full(finished.shape, np.nan)
    if finished.ndim != 2 or len(finished) != len(lengths) or running.shape != finished.shape:
        raise ValueError(
            f"finished, running: shapes {finished.shape}, {running.shape}; allowed: ({len(lengths)}, samples) each"
        )
    if not 0 < correlation < 1:
        raise ValueError(f"correlation: value {correlation}; allowed: above 0, below 1")
    spread = spread_of(lengths.expected, lengths.high)
    s = np.maximum(spread, _SPREAD_MIN)
    prior = np.log(lengths.expected) - spread**2 / 2
    group_variance, sample_variance = correlation * s**2, (1 - correlation) * s**2
    ended, bounded = ~np.isnan(finished), running >= 1
    observed = np.where(ended, np.log(np.where(ended, np.maximum(finished, 1), 1)), 0.0).sum(axis=1)
    bounds = np.log(np.where(bounded, running, 1))
    scale = (np.sqrt(sample_variance) * _LOGISTIC)[:, None]
    mean = prior
    for _ in range(STEPS):
        excess, information = _beyond((bounds - mean[:, None]) / scale)
        pulls = np.where(bounded, bounds + scale * excess - mean[:, None], 0.0).sum(axis=1)
        slope = (ended.sum(axis=1) + np.where(bounded, information, 0.0).sum(axis=1)) / sample_variance
        gradient = (prior - mean) / group_variance
        gradient = gradient + (observed - ended.sum(axis=1) * mean + pulls) / sample_variance
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
    """Tokens expected to follow each running response: [n, samples], else NaN; arguments as in `with_siblings`."""
    left: Floats = with_siblings(lengths, finished, running).expected[:, None] - running
    return left


def _beyond(u: Floats) -> tuple[Floats, Floats]:
    """For a standard logistic variable above u: its mean excess over u, and what that tells of its centre.

    The excess is (1 + e^u) ln(1 + e^-u), with derivative e^u ln(1 + e^-u) - 1. The information is that derivative plus
    1: 0 if u is far below the centre (nothing is learned), 1 if it is far above.
    """
    u = np.clip(u, -700.0, 30.0)
    log = np.logaddexp(0.0, -u)
    information: Floats = np.exp(u) * log
    return log + information, information
