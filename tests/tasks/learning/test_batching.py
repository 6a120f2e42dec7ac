import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.batching import collate, deal, dealt_passes, idle_batch, mini_batches
from tasks.learning.padding import padded_tokens, passes


@pytest.mark.parametrize("rows", [list, tuple, np.array])
def test_collate_by_hand(rows):
    batch = collate([7, 9], [rows([1]), rows([2, 3, 4])], [rows([5, 6]), rows([8])], [rows([-0.5, -1.0]), rows([-2.0])])
    assert batch.responses == (7, 9)
    assert batch.input_ids.tolist() == [[1, 5, 6, 0], [2, 3, 4, 8]]
    assert batch.prompt_lengths == (1, 3)
    assert batch.completion_ids.tolist() == [[5, 6], [8, 0]]
    assert batch.response_mask.tolist() == [[True, True], [True, False]]
    assert batch.sampler_logprobs.tolist() == [[-0.5, -1.0], [-2.0, 0.0]]
    assert batch.lengths.tolist() == [2, 1]
    assert (batch.input_ids.dtype, batch.sampler_logprobs.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (([4], [[]], [[1]], [[0.0]]), "response 4: 0 prompt"),
        (([4], [[1]], [[]], [[]]), "response 4: 1 prompt and 0 completion"),
        (([3, 4], [[1], [1]], [[1], [1, 2]], [[0.0], [0.0]]), "response 4: 1 log-probs for 2 sampled tokens"),
        (([3, 4], [[1]], [[1]], [[0.0]]), r"lists of \[1, 2\] rows"),
        (([], [], [], []), "at least one row"),
    ],
)
def test_collate_refuses_rows_that_do_not_belong_together(rows, message):
    with pytest.raises(ValueError, match=message):
        collate(*rows)


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


@given(st.lists(st.integers(), max_size=40), st.integers(1, 50))
def test_every_group_is_in_one_part_in_order_and_parts_are_even(groups, count):
    parts = mini_batches(groups, count)
    assert [group for part in parts for group in part] == groups
    assert len(parts) == min(count, len(groups))
    assert max(map(len, parts), default=1) - min(map(len, parts), default=1) <= 1


def test_a_count_below_one_is_refused():
    with pytest.raises(ValueError, match="num_mini_batches: value 0; allowed: >= 1"):
        mini_batches([1], 0)
