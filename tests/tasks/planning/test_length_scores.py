"""Recall and rank correlation, on figures small enough to count by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.lengths import rank_correlation, ranks, recall_of_longest

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=40)


def test_recall_counts_the_longest_fifth():
    actual = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert recall_of_longest(actual, actual) == 1
    assert recall_of_longest([-length for length in actual], actual) == 0
    assert recall_of_longest([0, 0, 0, 0, 0, 0, 0, 9, 0, 9], actual) == 0.5


def test_expectations_that_tie_are_in_any_order():
    # Each of four that tie gets one of the two places in half of the orders; one of them is right.
    assert recall_of_longest([5, 5, 5, 0, 0, 0, 0, 0, 0, 5], range(10)) == pytest.approx(0.25)
    assert recall_of_longest([5, 5, 5, 0, 0, 0, 0, 0, 0, 6], range(10)) == pytest.approx(0.5)
    assert recall_of_longest([1] * 10, range(10)) == pytest.approx(0.2)


def test_whoever_is_as_long_as_the_kth_was_right_to_name():
    actual = [1, 1, 1, 1, 1, 1, 1, 7, 7, 9]
    assert recall_of_longest([0, 0, 0, 0, 0, 0, 0, 1, 2, 0], actual) == 1
    assert recall_of_longest(actual, actual) == 1


@given(LENGTHS, st.randoms())
def test_recall_is_a_share_and_the_oracle_finds_all(actual, rng):
    expected = [rng.randint(0, 5) for _ in actual]
    assert 0 <= recall_of_longest(expected, actual) <= 1
    assert recall_of_longest(actual, actual) == 1


def test_ties_share_the_mean_of_their_ranks():
    assert ranks([30, 10, 20, 10]).tolist() == [4, 1.5, 3, 1.5]


def test_rank_correlation_knows_order_only():
    actual = np.array([3.0, 1.0, 2.0, 9.0])
    assert rank_correlation(np.exp(actual), actual) == pytest.approx(1)
    assert rank_correlation(-actual, actual) == pytest.approx(-1)
    # Two neighbours exchanged: 12 / 60 less than 1.
    assert rank_correlation([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(0.8)
    assert rank_correlation([5, 5, 5, 5], actual) == 0


@pytest.mark.parametrize("score", [recall_of_longest, rank_correlation])
@pytest.mark.parametrize("sides", [([], []), ([1.0], [1.0, 2.0]), ([[1.0]], [[1.0]])])
def test_sides_that_do_not_fit_are_refused(score, sides):
    with pytest.raises(ValueError, match="allowed: equal, of one group or more"):
        score(*sides)
