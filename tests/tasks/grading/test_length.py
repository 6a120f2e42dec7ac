import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.grading.length import LengthReward, length_penalty
from tasks.grading.reward import GradingCase, RewardOutcome


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (100, 0.0), (101, -0.02), (125, -0.5), (150, -1.0), (9000, -1.0)]
)
def test_it_falls_from_the_free_length_on_and_ends_at_minus_one(tokens: int, penalty: float):
    assert length_penalty(tokens, 100, 50) == penalty


@given(st.integers(0, 10_000), st.integers(0, 1000), st.integers(1, 1000))
def test_longer_is_never_better(tokens: int, free_tokens: int, scale_tokens: int):
    here, there = (length_penalty(number, free_tokens, scale_tokens) for number in (tokens, tokens + 1))
    assert -1.0 <= there <= here <= 0.0


def test_tokens_count_and_not_characters():
    cases = [GradingCase(0, "p", "x" * 99, (5, 6, 7), {}), GradingCase(1, "p", "", (5, 2), {})]
    assert LengthReward("brief", 2, 4).grade(cases) == [RewardOutcome(-0.25), RewardOutcome(0.0)]
