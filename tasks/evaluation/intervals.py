"""Estimates of an evaluation with their uncertainty: pass@k, and 95 % intervals over prompts. Pure functions."""

import math
from collections.abc import Callable, Sequence

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
BISECTIONS = 60


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k samples is correct, if c of n samples are: 1 - C(n-c, k) / C(n, k).

    Unbiased, unlike 1 - (1 - c/n)^k (Chen et al. 2021, arXiv 2107.03374, section 2.1). Raises ValueError unless
    0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k: n, c, k are {n}, {c}, {k}; allowed: 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def interval(values: Sequence[float], seed: int) -> tuple[float, float] | None:
    """A 95 % interval of the mean of the prompts' values; None for a single value, which shows no spread.

    If every value is 0 or 1, it is the exact binomial interval, even for one value: it is right for few prompts, and
    not empty if all values are equal. Otherwise it is the bootstrap's.
    """
    if set(values) <= {0.0, 1.0}:
        return binomial_interval(int(sum(values)), len(values))
    return bootstrap_interval(values, seed) if len(values) > 1 else None


def binomial_interval(successes: int, trials: int) -> tuple[float, float]:
    """The exact 95 % interval of a proportion (Clopper and Pearson 1934, Biometrika 26)."""
    tail = (1.0 - LEVEL) / 2
    low = 0.0 if successes == 0 else _root(lambda p: _at_least(successes, trials, p) - tail)
    high = 1.0 if successes == trials else _root(lambda p: tail - _at_most(successes, trials, p))
    return low, high


def bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """The 95 % percentile interval of the mean over RESAMPLES resamples of the prompts; the same for the same seed."""
    numbers = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    means = [numbers[generator.integers(len(numbers), size=len(numbers))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1.0 - LEVEL) / 2, (1.0 + LEVEL) / 2])
    return float(low), float(high)


def _at_least(successes: int, trials: int, p: float) -> float:
    return math.fsum(_binomial(count, trials, p) for count in range(successes, trials + 1))


def _at_most(successes: int, trials: int, p: float) -> float:
    return math.fsum(_binomial(count, trials, p) for count in range(successes + 1))


def _binomial(count: int, trials: int, p: float) -> float:
    """The chance of `count` successes; through logarithms, because the coefficient alone may exceed a float's range."""
    chosen = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
    return math.exp(chosen + count * math.log(p) + (trials - count) * math.log1p(-p))


def _root(rising: Callable[[float], float]) -> float:
    """The point in (0, 1) where a rising function crosses zero."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
