import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.sampling.engines import prefill_passes
from tasks.sampling.engines.prefill_passes import Piece, packed_passes, padded_passes

LENGTHS = st.lists(st.integers(0, 40), max_size=12)


def pieces_of(lengths):
    return [Piece(row, 3 * row, tuple(range(100 * row, 100 * row + n))) for row, n in enumerate(lengths)]


def joined(passes):
    """Each row's first position and tokens, as the passes compute them in their order."""
    rows = {}
    for piece in (piece for passed in passes for piece in passed):
        first, tokens = rows.setdefault(piece.row, (piece.first, []))
        assert piece.first == first + len(tokens), "a row's tokens are computed in order"
        assert piece.token_ids
        tokens.extend(piece.token_ids)
    return {row: (first, tuple(tokens)) for row, (first, tokens) in rows.items()}


@pytest.fixture(autouse=True, scope="module")
def small_passes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_passes, "TOKENS_MAX", 30)
        patch.setattr(prefill_passes, "_LENGTH_MAX", 9)
        yield


@given(LENGTHS)
def test_both_ways_compute_every_token_once_and_in_order(lengths):
    pieces = pieces_of(lengths)
    wanted = {piece.row: (piece.first, piece.token_ids) for piece in pieces if piece.token_ids}
    assert joined(packed_passes(pieces)) == wanted
    assert joined([passed for passed, _ in padded_passes(pieces)]) == wanted


@given(LENGTHS)
def test_passes_are_bounded_and_packed_ones_full(lengths):
    sizes = [sum(len(piece.token_ids) for piece in passed) for passed in packed_passes(pieces_of(lengths))]
    assert all(size == 30 for size in sizes[:-1])
    assert all(0 < size <= 30 for size in sizes)
    for passed, length in padded_passes(pieces_of(lengths)):
        assert max(len(piece.token_ids) for piece in passed) == length <= 9
        assert len(passed) * length <= 30
