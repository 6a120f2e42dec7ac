import pytest
import torch

from tasks.sampling.engines.packed_cache import PackedCache
from tasks.sampling.engines.prefill_passes import Piece
from tasks.sampling.engines.row_attention import plain

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [300, 511, 512, 700, 1279])
def test_a_row_that_serves_no_response_keeps_all_that_it_holds(length):
    """Also if it is as full as the capacity, or as the context, allows."""
    cache = PackedCache(rows=3, context_length=1280, dtype=torch.float32, device=CPU, attention=plain)
    keys, values, queries = (torch.randn(length, heads, 8) for heads in (1, 1, 2))
    [(_, _, window)] = cache.prefill_windows([Piece(1, 0, tuple(range(length)))])
    assert window.attend(0, queries, keys, values).shape == (length, 16)
    step = cache.step_window(torch.tensor([5, -1, 7]), 8)
    found = step.attend(0, torch.randn(3, 2, 8), torch.ones(3, 1, 8), torch.ones(3, 1, 8))
    assert found.isfinite().all()
    assert step.positions.tolist() == [5, 0, 7]
    for held, new in zip(cache._layers[0], (keys, values), strict=True):
        assert torch.equal(held[1, :length], new)
        assert held[0, 5].eq(1).all()
        assert held[2, 7].eq(1).all()


def test_what_is_held_stays_when_the_cache_grows_to_the_context_at_most():
    cache = PackedCache(rows=2, context_length=1100, dtype=torch.bfloat16, device=CPU, attention=plain)
    assert cache.capacity == 512
    keys = torch.randn(7, 1, 8).bfloat16()
    [(_, token_ids, window)] = cache.prefill_windows([Piece(1, 0, (1, 2, 3)), Piece(0, 2, (4, 5, 6, 7))])
    assert token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    window.attend(0, torch.randn(7, 1, 8).bfloat16(), keys, keys)
    for span, capacity in ((500, 512), (600, 1024), (1099, 1280)):
        cache.reserve(span)
        assert cache.capacity == capacity
        assert torch.equal(cache._layers[0][0][1, :3], keys[:3])
        assert torch.equal(cache._layers[0][1][0, 2:6], keys[3:])
    cache.copy_rows([1, 0], [0, 1], 4)
    assert torch.equal(cache._layers[0][0][0, :3], keys[:3])
    assert torch.equal(cache._layers[0][0][1, 2:4], keys[3:5])
