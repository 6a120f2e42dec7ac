"""The log-normal distribution of lengths with a given mean and 0.9 quantile.

ln(high / expected) is HIGH * s - s^2 / 2 for a deviation s, and largest at s = HIGH. Pure functions of arrays.
"""

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# The normal distribution's 0.9 quantile.
HIGH = NormalDist().inv_cdf(0.9)


def spread_of(expected: Floats, high: Floats) -> Floats:
    """The deviation of ln(length) of the log-normal with this mean and 0.9 quantile, at most HIGH."""
    ratio = np.log(np.maximum(high, expected) / expected)
    spread: Floats = HIGH - np.sqrt(np.maximum(0.0, HIGH**2 - 2 * ratio))
    return spread


def high_of(expected: Floats, deviation: Floats) -> Floats:
    """The 0.9 quantile of the log-normal with this mean and deviation of lengths; the inverse of `spread_of`."""
    spread = np.minimum(HIGH, np.sqrt(np.log1p((deviation / expected) ** 2)))
    high: Floats = expected * np.exp(HIGH * spread - spread**2 / 2)
    return high
