import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.dealing import deal, dealt_passes, idle_batch
from tasks.learning.padding import padded_tokens, passes

LENGTHS = st.lists(st.integers(1, 50), max_size=20)


def test_the_longest_go_first_to_who_has_least():
    assert deal([3, 9, 4, 5, 8], 2) == [[0, 1, 2], [3, 4]]  # 9 | 8, 9 | 8 5, 9 4 | 8 5, 9 4 3 | 8 5
    assert deal([7, 7, 7], 3) == [[0], [1], [2]]
    assert deal([2], 2) == [[0], []]
    assert deal([], 2) == [[], []]


@given(LENGTHS, st.integers(1, 5))
def test_every_response_is_dealt_once_and_evenly(lengths, world_size):
    hands = deal(lengths, world_size)
    assert len(hands) == world_size
    assert sorted(position for hand in hands for position in hand) == list(range(len(lengths)))
    tokens = [sum(lengths[position] for position in hand) for hand in hands]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@given(LENGTHS, st.integers(1, 200), st.integers(1, 5))
def test_all_ranks_make_as_many_passes_within_the_limit(lengths, tokens_max, world_size):
    dealt = dealt_passes(lengths, tokens_max, world_size)
    assert len({len(parts) for parts in dealt}) == 1
    assert sorted(i for parts in dealt for part in parts for i in part) == list(range(len(lengths)))
    for part in (part for parts in dealt for part in parts if len(part) > 1):
        assert padded_tokens([lengths[i] for i in part]) <= tokens_max


@given(LENGTHS.filter(bool), st.integers(1, 200))
def test_one_rank_makes_the_passes_it_made_before(lengths, tokens_max):
    assert dealt_passes(lengths, tokens_max, 1) == [[list(part) for part in passes(lengths, tokens_max)]]


def test_an_idle_batch_has_one_token_and_no_rank_at_all_is_refused():
    batch = idle_batch(torch.device("cpu"))
    assert batch.lengths.tolist() == [1]
    assert batch.input_ids.shape == (1, 2)
    with pytest.raises(ValueError, match="world_size: value 0; allowed: 1 or more"):
        deal([1], 0)
