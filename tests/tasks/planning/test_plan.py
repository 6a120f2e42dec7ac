import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.plan import assign_groups


@given(st.integers(1, 200), st.integers(1, 50))
def test_every_group_is_given_to_one_slot_and_slots_are_even(groups, slots):
    assignment = assign_groups(groups, slots)
    assert len(assignment) == slots
    assert sorted(group for slot in assignment for group in slot) == list(range(groups))
    sizes = [len(slot) for slot in assignment]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("groups", "slots"), [(0, 1), (1, 0)])
def test_nothing_to_assign_is_refused(groups, slots):
    with pytest.raises(ValueError, match="at least one of each"):
        assign_groups(groups, slots)
