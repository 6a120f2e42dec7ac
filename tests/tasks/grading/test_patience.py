"""What calls of a reward function may take, and cost, when some of them hang."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.grading.patience import Patience

LIMIT_S = 10.0


def patient(calls: int) -> Patience:
    patience = Patience(LIMIT_S)
    patience.expect(calls)
    return patience


def hang(patience: Patience, start_s: float = 0.0, *, ended: bool = True) -> float:
    """One more call hangs; what it was allowed. ended: its process had to be ended."""
    allowed_s = patience.allowed_s(start_s)
    if allowed_s:
        patience.hung += 1
        patience.lost(allowed_s + (start_s if ended else 0.0), ended=ended)
    return allowed_s


def test_after_each_call_that_hangs_the_next_may_take_half_as_long_if_some_are_answered():
    patience = patient(1000)
    patience.answered(0.01)
    assert [hang(patience) for _ in range(4)] == [10.0, 5.0, 2.5, 1.25]
    # Without an answer nobody knows how slow the function is.
    patience = patient(1000)
    assert [hang(patience) for _ in range(6)] == [10.0, 10.0, 10.0, 10.0, 10.0, 0.02]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.floats(0.0, 60.0))
def test_a_function_that_always_hangs_costs_a_bounded_number_of_time_limits(batches, start_s):
    patience = Patience(LIMIT_S)
    for calls in batches:
        patience.expect(calls)
        for _ in range(calls):
            hang(patience, start_s)
    assert patience.lost_s <= 9 * (LIMIT_S + start_s)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_calls_that_are_interrupted_are_all_made_and_cost_little_more(batches):
    """A verifier of Gleaner's own is not started again, so that no answer is passed over unread."""
    patience = Patience(LIMIT_S)
    for calls in batches:
        patience.expect(calls)
        assert min(hang(patience, ended=False) for _ in range(calls)) > 0.0
    assert patience.lost_s <= 30 * LIMIT_S  # 5 LIMIT_S, and at most 2 LIMIT_S (1 + ln(6000))


@given(st.floats(0.001, 5.0), st.integers(1, 500))
def test_what_honest_calls_take_stays_allowed(honest_s, hung):
    patience = patient(1000)
    for _ in range(100):
        patience.answered(honest_s)
    for _ in range(hung):
        hang(patience, ended=False)
    times = 20 if patience.lost_s <= 4 * LIMIT_S + 100 * honest_s else 5
    assert patience.allowed_s(0.0) >= min(LIMIT_S, times * honest_s * (1 - 1e-9))


def test_slow_answers_buy_time_for_calls_that_hang():
    """One of ten calls hangs, and the others take half the limit: each may take all of it, and none is passed over."""
    patience = patient(1000)
    for call in range(1000):
        assert patience.allowed_s(1.0) == LIMIT_S
        if call % 10 == 9:
            hang(patience, 1.0)
        else:
            patience.answered(LIMIT_S / 2)
    assert patience.hung == 100
    assert patience.lost_s == pytest.approx(100 * (LIMIT_S + 1.0))
