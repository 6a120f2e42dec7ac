import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.batching import collate, padded_tokens, passes


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 500))
def test_passes_hold_every_response_once_in_order_within_the_limit(lengths, tokens_max):
    divided = passes(lengths, tokens_max)
    assert [index for part in divided for index in part] == list(range(len(lengths)))
    assert all(divided)
    for part in divided:
        assert len(part) == 1 or padded_tokens([lengths[index] for index in part]) <= tokens_max
    for part, following in itertools.pairwise(divided):
        assert padded_tokens([lengths[index] for index in (*part, following[0])]) > tokens_max


def test_what_fits_is_one_pass_and_a_single_long_response_is_one_too():
    assert passes([5, 9, 5], 27) == [range(3)]
    assert passes([90, 5, 5], 20) == [range(1), range(1, 3)]
    with pytest.raises(ValueError, match="tokens_max: value 0"):
        passes([1], 0)


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
