"""Estimates against brute force, and against numbers that others have published or that can be worked out by hand."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluation.intervals import binomial_interval, bootstrap_interval, interval, pass_at_k


@st.composite
def counts(draw, largest=9):
    n = draw(st.integers(1, largest))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(counts())
def test_pass_at_k_is_the_share_of_subsets_of_k_samples_with_a_correct_one(drawn):
    n, c, k = drawn
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@given(counts(largest=300))
def test_it_is_the_product_that_chen_et_al_compute(drawn):
    n, c, k = drawn
    product = 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
    assert pass_at_k(n, c, k) == pytest.approx(product, abs=1e-9)


@pytest.mark.parametrize(("p", "n", "k"), [(0.3, 5, 3), (0.05, 8, 4)])
def test_it_is_unbiased_and_the_plain_estimate_is_not(p, n, k):
    """Its expectation over the number of correct samples is 1 - (1 - p)^k."""
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = math.fsum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    plain = math.fsum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
    assert abs(plain - (1 - (1 - p) ** k)) > 0.01


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_what_is_no_sample_of_anything_is_refused(n, c, k):
    with pytest.raises(ValueError, match=r"^pass@k: n, c, k are "):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.3084971),  # 1 - 0.025^(1/10)
        (10, 10, 0.6915029, 1.0),
        (5, 10, 0.1870860, 0.8129140),
        (1, 1, 0.025, 1.0),
        (81, 263, 0.2527, 0.3676),  # the worked example of Newcombe 1998, Statistics in Medicine 17, 857-872
    ],
)
def test_exact_binomial_intervals(successes, trials, low, high):
    assert binomial_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.slow
@given(st.integers(1, 400).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials))))
def test_an_exact_interval_holds_the_proportion_and_mirrors_itself(drawn):
    successes, trials = drawn
    low, high = binomial_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    assert low < high
    assert binomial_interval(trials - successes, trials) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_the_bootstrap_repeats_itself_and_is_as_wide_as_the_standard_error_says():
    values = list(np.random.default_rng(1).random(400))
    low, high = bootstrap_interval(values, seed=3)
    assert (low, high) == bootstrap_interval(values, seed=3)
    assert (low, high) != bootstrap_interval(values, seed=4)
    half = 1.96 * np.std(values) / math.sqrt(len(values))
    assert (low, high) == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=0.15 * half)


def test_equal_values_of_zero_or_one_are_not_taken_for_certainty():
    assert interval([0.0] * 4, seed=0) == binomial_interval(0, 4)
    assert interval([1.0, 0.0, 1.0], seed=0) == binomial_interval(2, 3)
    assert interval([0.5, 0.0, 1.0], seed=0) == bootstrap_interval([0.5, 0.0, 1.0], 0)


def test_one_prompt_says_nothing_of_the_spread_unless_it_is_a_coin():
    assert interval([0.5], seed=0) is None
    assert interval([1.0], seed=0) == binomial_interval(1, 1)
