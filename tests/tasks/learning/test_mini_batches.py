import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.mini_batches import mini_batches


@given(st.lists(st.integers(), max_size=40), st.integers(1, 50))
def test_every_group_is_in_one_part_in_order_and_parts_are_even(groups, count):
    parts = mini_batches(groups, count)
    assert [group for part in parts for group in part] == groups
    assert len(parts) == min(count, len(groups))
    assert max(map(len, parts), default=1) - min(map(len, parts), default=1) <= 1


def test_a_count_below_one_is_refused():
    with pytest.raises(ValueError, match="num_mini_batches: value 0; allowed: >= 1"):
        mini_batches([1], 0)
