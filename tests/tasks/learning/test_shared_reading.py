"""Which rank reads which tensor, and which rows each gets; whole checkpoints are in test_sharded.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.sharded import own_rows
from tasks.learning.shared_reading import owners_of


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 16))
def test_every_tensor_has_a_reader_in_order_and_shares_are_about_equal(sizes, ranks):
    owners = owners_of(sizes, ranks)
    assert len(owners) == len(sizes)
    assert owners == sorted(owners)
    assert all(0 <= owner < ranks for owner in owners)
    read = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert max(read) <= sum(sizes) / ranks + max(sizes, default=0) + 1


@given(st.integers(0, 200), st.integers(1, 70))
def test_a_rank_holds_the_rows_that_torch_gives_it(rows, ranks):
    chunks = torch.chunk(torch.arange(rows), ranks)
    for rank in range(ranks):
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(rows))[own_rows(rows, ranks, rank)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 5])
def test_tensors_of_any_shape_are_read_once_and_dealt_bit_for_bit(tmp_path, ranks_server, count):
    for ranks in (count, 1):
        (tmp_path / str(ranks)).mkdir()
    by_rank, [alone] = (ranks_server.launch("deal", tmp_path / str(ranks), ranks) for ranks in (count, 1))
    assert len(by_rank) == count
    for single, *draw in zip(alone, *by_rank, strict=True):
        stored, scalars = draw[0]["stored"], draw[0]["scalars"]
        assert [each["wrong"] for each in draw] == [[]] * count
        assert sum(each["held"] for each in draw) == stored + (count - 1) * scalars
        # The headers of the objects come on top; ranks that read from the same object both read its header.
        headers = single["read"] - stored
        assert stored + headers <= sum(each["read"] for each in draw) <= stored + count * headers
    assert any(each["stored"] for each in by_rank[0])
