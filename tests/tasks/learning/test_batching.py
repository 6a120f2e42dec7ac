import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.batching import collate, micro_batches, padded_tokens


@given(
    st.dictionaries(st.integers(0, 99), st.lists(st.integers(1, 60), min_size=3, max_size=3), max_size=12),
    st.integers(1, 500),
    st.data(),
)
def test_micro_batches_hold_every_group_once_in_order_within_the_limit(lengths, tokens_max, data):
    groups = data.draw(st.permutations(sorted(lengths)))
    batches = micro_batches(groups, lengths, tokens_max)
    assert [group for batch in batches for group in batch] == groups
    assert all(batches)
    for batch in batches:
        assert len(batch) == 1 or padded_tokens([n for group in batch for n in lengths[group]]) <= tokens_max
    for batch, following in itertools.pairwise(batches):
        together = [n for group in (*batch, following[0]) for n in lengths[group]]
        assert padded_tokens(together) > tokens_max
    # All but the last batch are known before the later groups are.
    earlier = micro_batches(groups[:-1], lengths, tokens_max)
    assert earlier[:-1] == batches[: max(0, len(earlier) - 1)]


def test_a_group_above_the_limit_is_a_batch_of_its_own():
    assert micro_batches([3, 1, 2], {1: [90, 5], 2: [5, 5], 3: [4, 4]}, 20) == [(3,), (1,), (2,)]
    assert micro_batches([1, 2], {1: [90], 2: [5]}, 20) == [(1,), (2,)]
    with pytest.raises(ValueError, match="tokens_max: value 0"):
        micro_batches([], {}, 0)


@pytest.mark.parametrize("rows", [list, tuple, np.array])
def test_collate_by_hand(rows):
    batch = collate([7, 9], [rows([1]), rows([2, 3, 4])], [rows([5, 6]), rows([8])], [rows([-0.5, -1.0]), rows([-2.0])])
    assert batch.responses == (7, 9)
    assert batch.input_ids.tolist() == [[1, 5, 6, 0], [2, 3, 4, 8]]
    assert batch.prompt_lengths.tolist() == [1, 3]
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
        (([3, 4], [[1], [1]], [[1], [1, 2]], [[0.0], [0.0]]), "response 4: 1 log-probs for 2 tokens"),
        (([3, 4], [[1]], [[1]], [[0.0]]), r"lists of \[1, 2\] rows"),
        (([], [], [], []), "at least one row"),
    ],
)
def test_collate_refuses_rows_that_do_not_belong_together(rows, message):
    with pytest.raises(ValueError, match=message):
        collate(*rows)
