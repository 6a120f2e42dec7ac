import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.division import assign_groups, groups_in_budget


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


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 200))
def test_every_slot_starts_with_what_is_trained_first(groups, slots, first):
    """Of the first so many groups of the plan, none is behind another group in its slot's order."""
    for slot in assign_groups(groups, slots):
        assert list(slot) == sorted(slot)
        wanted = [group < first for group in slot]
        assert wanted == sorted(wanted, reverse=True)


@pytest.mark.parametrize(
    ("wanted", "budget", "planned"), [(4, 2.0, 8), (10, 1.1, 11), (3, 1.5, 5), (7, 1.0, 7), (100, 1.07, 107)]
)
def test_the_budget_is_rounded_up_from_how_it_is_written(wanted, budget, planned):
    assert groups_in_budget(wanted, budget) == planned


@pytest.mark.parametrize(("wanted", "budget"), [(0, 2.0), (1, 0.5)])
def test_an_impossible_budget_is_refused(wanted, budget):
    with pytest.raises(ValueError, match="allowed: at least 1 each"):
        groups_in_budget(wanted, budget)
