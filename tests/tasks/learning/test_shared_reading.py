"""Which rank reads which tensor, and what one rank alone does; several ranks are in test_sharded.py."""

from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.shared_reading import owners_of


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 16))
def test_every_tensor_has_a_reader_in_order_and_shares_are_about_equal(sizes, ranks):
    owners = owners_of(sizes, ranks)
    assert len(owners) == len(sizes)
    assert owners == sorted(owners)
    assert all(0 <= owner < ranks for owner in owners)
    read = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert max(read) <= sum(sizes) / ranks + max(sizes, default=0) + 1
