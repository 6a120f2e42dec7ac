"""The row of a packed pass: each response has its tokens in order before it, and a shared prompt lies there once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.learning.batching import collate
from tasks.learning.packed_row import packed_row, repeated, same_prompts

ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(3, 9), min_size=1, max_size=5)),
    min_size=1,
    max_size=7,
)


def row_of(rows):
    prompts, completions = zip(*rows, strict=True)
    batch = collate(range(len(rows)), prompts, completions, [[0.0] * len(each) for each in completions])
    return batch, packed_row(batch.total_lengths, batch.prompt_lengths, batch.same_prompts)


def attended(row):
    """For each place in the row, the places of the tokens that it attends to, itself included."""
    tokens = list(range(len(row.places))) if row.repeats is None else row.repeats.tokens.tolist()
    found = []
    for (start, end), (key_start, key_end) in zip(
        pairwise(row.query_bounds.tolist()), pairwise(row.key_bounds.tolist()), strict=True
    ):
        keys = tokens[key_start:key_end]
        found += [keys[: len(keys) - (end - start) + query + 1] for query in range(end - start)]
    return found


@given(ROWS)
def test_each_token_attends_to_those_of_its_response_before_it(rows):
    batch, row = row_of(rows)
    seen, ids = attended(row), batch.input_ids.flatten()[row.places].tolist()
    for index, (prompt, completion) in enumerate(rows):
        response = [*prompt, *completion]
        for t in range(len(prompt) - 1, len(response)):
            place = int(row.origins[index]) + t
            assert [ids[each] for each in seen[place]] == response[: t + 1]
            assert [int(row.positions[each]) for each in seen[place]] == list(range(t + 1))


@given(ROWS)
def test_a_row_has_a_shared_prompt_once(rows):
    batch, row = row_of(rows)
    assert len(row.places) == sum(batch.total_lengths) - batch.repeated_tokens
    assert len(set(row.places.tolist())) == len(row.places)
    groups = {}
    for prompt, _ in rows:
        groups.setdefault(tuple(prompt), []).append(prompt)
    assert batch.repeated_tokens == sum((len(prompt) - 1) * (len(group) - 1) for prompt, group in groups.items())
    assert row.queries_max == max(end - start for start, end in pairwise(row.query_bounds.tolist()))
    assert row.keys_max == max(end - start for start, end in pairwise(row.key_bounds.tolist()))


@given(ROWS)
def test_a_key_gets_the_gradients_of_all_its_places(rows):
    row = row_of(rows)[1]
    if row.repeats is None:
        return
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, 2, len(row.places), 3, dtype=torch.float64, generator=generator)
    left, right = (values.clone().requires_grad_() for _ in range(2))
    factors = torch.randn(1, 2, len(row.repeats.tokens), 3, dtype=torch.float64, generator=generator)
    found, expected = repeated(left, row.repeats), right.index_select(2, row.repeats.tokens)
    assert torch.equal(found, expected)
    (found * factors).sum().backward()
    (expected * factors).sum().backward()
    torch.testing.assert_close(left.grad, right.grad)


class LargestTensor(TorchDispatchMode):
    """The values of the largest tensor that an operation within the block returns."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.values = max(self.values, found.numel() if isinstance(found, torch.Tensor) else 0)
        return found


def test_gradients_of_a_long_prompt_of_few_beside_a_short_one_of_many_take_no_more_room_than_all_keys():
    """At 42 places for each of the long prompt's tokens they would take 17 times that."""
    row = row_of([([1] * 300, [3])] * 2 + [([1, 2], [3])] * 42)[1]
    values = torch.zeros(1, 1, len(row.places), 4, requires_grad=True)
    found = repeated(values, row.repeats)
    with LargestTensor() as largest:
        found.backward(torch.ones_like(found))
    assert largest.values <= found.numel()


def test_gradients_in_half_precision_are_added_in_float32():
    """258 ones, of which bfloat16 has 256 if the first 257 are rounded before the last is added."""
    row = row_of([([1, 2], [3])] * 257)[1]
    values = torch.zeros(1, 1, len(row.places), 1, dtype=torch.bfloat16, requires_grad=True)
    repeated(values, row.repeats).sum().backward()
    assert values.grad[0, 0, 0, 0] == torch.tensor(258.0, dtype=torch.bfloat16)
    assert torch.equal(values.grad[0, 0, 1:, 0], torch.ones(len(row.places) - 1, dtype=torch.bfloat16))


def test_equal_prompts_are_found_by_their_tokens():
    assert same_prompts([[1], [1, 2], [1], (1, 2), [2]]) == (0, 1, 0, 1, 4)


@pytest.mark.parametrize("prompts", [[[1, 2], [2, 1]], [[1], [1]]], ids=["different prompts", "prompts of one token"])
def test_nothing_is_repeated_where_nothing_is_shared(prompts):
    row = row_of([(prompt, [3, 4]) for prompt in prompts])[1]
    assert row.repeats is None
    assert torch.equal(row.query_bounds, row.key_bounds)
