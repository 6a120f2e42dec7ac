import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.padding import (
    PASS_COST_TOKENS,
    REPEATED_PER_TOKEN,
    SharedPrompt,
    padded_tokens,
    passes,
    together,
)

LENGTHS = st.lists(st.integers(1, 2000), min_size=1, max_size=7)


def cost(parts, lengths):
    return sum(padded_tokens([lengths[index] for index in part]) + PASS_COST_TOKENS for part in parts)


def divisions(indices):
    """All divisions of a sequence into parts of neighbours."""
    for cuts in itertools.product([False, True], repeat=len(indices) - 1):
        parts = [[indices[0]]]
        for index, cut in zip(indices[1:], cuts, strict=True):
            if cut:
                parts.append([])
            parts[-1].append(index)
        yield parts


@given(LENGTHS, st.integers(1, 8000))
def test_passes_hold_every_response_once_within_the_limit_at_the_least_cost(lengths, tokens_max):
    divided = passes(lengths, tokens_max)
    assert sorted(index for part in divided for index in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in divided)

    def allowed(part):
        return len(part) == 1 or padded_tokens([lengths[index] for index in part]) <= tokens_max

    assert all(allowed(part) for part in divided)
    by_length = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    best = min(cost(parts, lengths) for parts in divisions(by_length) if all(allowed(part) for part in parts))
    assert cost(divided, lengths) == best


def test_equal_lengths_are_divided_in_order_and_into_few_passes():
    assert passes([9] * 5, 18) == [[0, 1], [2, 3], [4]]
    assert passes([5, 9, 5], 27) == [[0, 1, 2]]


def test_similar_lengths_share_a_pass_where_that_saves_more_than_a_pass_costs():
    assert passes([2000, 100, 2000, 100], 100_000) == [[0, 2], [1, 3]]
    assert passes([2000, 1990, 2000, 1990], 100_000) == [[0, 1, 2, 3]]


def test_a_single_long_response_is_a_pass_and_no_limit_is_refused():
    assert passes([5, 90, 5], 20) == [[1], [0, 2]]
    assert passes([], 20) == []
    with pytest.raises(ValueError, match="tokens_max: value 0"):
        passes([1], 0)


def test_responses_to_one_prompt_take_the_longest_twice_or_share_the_prompt():
    prompt = SharedPrompt(0, 16)
    assert together([20, 30], prompt) == padded_tokens([20, 30]) == 60
    assert together([20, 30], prompt, packed=True) == 20 + 30 - 16 + 16 // REPEATED_PER_TOKEN
    assert together([20], prompt, packed=True) == together([20], prompt) == 20
