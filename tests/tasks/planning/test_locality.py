import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.dispatch import Assignment, Member
from tasks.planning.locality import decode_s, longest_nearest
from tests.planning_requests import CURVE


def a_member(start_s: float, **changes) -> Member:
    return Member(pool="rollout", step_time=CURVE, responses_max=8, start_s=start_s, **changes)


def an_assignment(group: int, member: Member, seconds: float) -> Assignment:
    return Assignment(groups=(group,), batch_max=None, ends_s=member.start_s + seconds)


def placed(members, seconds, *, losses=None, same_price=False):
    dealt = [an_assignment(k, member, seconds[k]) for k, member in enumerate(members)]
    found = longest_nearest(members, dealt, losses or [0.0] * len(members), same_price=same_price)
    return [assignment.groups[0] for assignment in found], [assignment.ends_s for assignment in found]


def test_the_longest_goes_to_the_nearest():
    members = [a_member(60.0), a_member(0.0), a_member(20.0)]
    assert placed(members, [100.0, 30.0, 70.0]) == ([1, 0, 2], [90.0, 100.0, 90.0])


def test_of_equally_near_ones_who_is_lost_more_rarely():
    members = [a_member(10.0), a_member(10.0)]
    assert placed(members, [100.0, 30.0], losses=[2.0, 0.0])[0] == [1, 0]
    assert placed(members, [30.0, 100.0], losses=[2.0, 0.0])[0] == [0, 1]


def test_nothing_moves_among_members_alike():
    assert placed([a_member(10.0)] * 3, [1.0, 3.0, 2.0])[0] == [0, 1, 2]


@pytest.mark.parametrize("changes", [{"window_s": 50.0}, {"usd_per_h": 3.0}])
def test_windows_and_where_it_matters_prices_are_left_alone(changes):
    members = [a_member(60.0), a_member(0.0, **changes)]
    assert placed(members, [100.0, 30.0], same_price=True)[0] == [0, 1]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 500), st.floats(0, 3)), min_size=1, max_size=8))
def test_work_is_only_exchanged_and_never_ends_later(figures):
    members = [a_member(start_s) for start_s, *_ in figures]
    seconds = [s for _, s, _ in figures]
    groups, ends = placed(members, seconds, losses=[loss for *_, loss in figures])
    assert sorted(groups) == list(range(len(members)))
    assert max(ends) <= max(m.start_s + s for m, s in zip(members, seconds, strict=True)) + 1e-9


def test_who_has_nothing_decodes_for_no_time():
    nothing = Assignment(groups=(), batch_max=None, ends_s=0.0)
    assert decode_s(a_member(9.0), nothing) == 0.0
    members = [a_member(9.0), a_member(0.0)]
    moved = longest_nearest(members, [an_assignment(0, members[0], 5.0), nothing], [0.0, 0.0], same_price=False)
    assert moved == (nothing, Assignment(groups=(0,), batch_max=None, ends_s=5.0))
