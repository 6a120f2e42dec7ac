import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.cut import should_cut


def test_a_member_leaves_when_its_share_has_ended_and_the_rest_fits():
    assert should_cut(7, 10, 3, [2, 1], 0.7)
    assert not should_cut(6, 10, 4, [9], 0.7)
    assert not should_cut(7, 10, 3, [2], 0.7)
    assert not should_cut(7, 10, 3, [], 0.7)
    assert not should_cut(7, 10, 3, [2, 1], None)


def test_shares_count_as_they_are_written():
    assert should_cut(11, 20, 9, [9], 0.55)
    assert should_cut(7, 10, 3, [3], 0.7)


def test_who_has_nothing_has_nothing_to_hand_over():
    assert not should_cut(10, 10, 0, [5], 0.5)
    assert not should_cut(0, 0, 3, [5], 0.5)


@pytest.mark.parametrize(("ended", "total"), [(-1, 4), (5, 4)])
def test_impossible_counts_are_refused(ended, total):
    with pytest.raises(ValueError, match=r"ended: .* allowed: 0 to total"):
        should_cut(ended, total, 1, [1], 0.5)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.lists(st.integers(-5, 20)), st.floats(0.01, 0.99))
def test_nothing_is_handed_over_that_has_no_place(ended, more, unfinished, rooms, share):
    if should_cut(ended, ended + more, unfinished, rooms, share):
        assert 0 < unfinished <= sum(room for room in rooms if room > 0)
        assert ended >= share * (ended + more) - 1e-9
        assert should_cut(ended, ended + more, unfinished, [*rooms, 3], share)
