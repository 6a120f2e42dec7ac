"""Who takes what from whom: the rules of RLBoost's Algorithm 2, and what is never done."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.rebalance import Candidate, Cause, Holder, Seeker, Transfer, choose, next_transfer, should_cut

IDLE = Seeker(room=8, running=0)


def a_holder(name: str = "a", **changes) -> Holder:
    quiet = Holder(
        incarnation=name,
        lost=False,
        idle=False,
        unfinished=0,
        running=0,
        waiting=0,
        released=0,
        tokens_per_s=None,
        plateau=0,
    )
    return replace(quiet, **changes)


def a_candidate(response: int, **changes) -> Candidate:
    return replace(Candidate(response=response, length=0, begun=False, released=False, held_before=False), **changes)


def test_nothing_to_take_and_no_room():
    assert next_transfer(IDLE, [], 0) is None
    assert next_transfer(IDLE, [a_holder(unfinished=3, running=3)], 0) is None
    assert next_transfer(replace(IDLE, room=0), [a_holder(lost=True, unfinished=3)], 5) is None


def test_what_is_free_comes_first_and_the_largest_heap_of_it():
    holders = [a_holder("a", lost=True, unfinished=3), a_holder("b", unfinished=9, waiting=9)]
    assert next_transfer(IDLE, holders, 0) == Transfer(cause=Cause.LOST, incarnation="a", count=3)
    assert next_transfer(IDLE, holders, 5) == Transfer(cause=Cause.UNCLAIMED, incarnation=None, count=5)
    released = [a_holder("c", unfinished=4, running=4, released=4)]
    assert next_transfer(IDLE, released, 0) == Transfer(cause=Cause.RELEASED, incarnation="c", count=4)


def test_what_is_free_is_shared_with_the_others_that_have_nothing():
    holders = [a_holder("a", lost=True, unfinished=9), a_holder("b", idle=True), a_holder("c", idle=True)]
    assert next_transfer(IDLE, holders, 0) == Transfer(cause=Cause.LOST, incarnation="a", count=3)
    assert next_transfer(replace(IDLE, room=2), holders, 0) == Transfer(cause=Cause.LOST, incarnation="a", count=2)


def test_unstarted_work_of_the_fullest_is_halved_even_while_one_decodes():
    holders = [a_holder("a", unfinished=5, waiting=3), a_holder("b", unfinished=9, waiting=6)]
    expected = Transfer(cause=Cause.UNSTARTED, incarnation="b", count=3)
    assert next_transfer(IDLE, holders, 0) == expected
    assert next_transfer(Seeker(room=4, running=3), holders, 0) == expected


def test_the_last_of_a_queue_are_asked_for_only_if_their_holder_may_have_begun_them():
    busy = a_holder("b", unfinished=12, running=4, waiting=8)
    asked = [
        (waiting, transfer.count, transfer.asks)
        for waiting in (20, 8, 7, 6, 1)
        if (transfer := next_transfer(Seeker(room=4, running=3), [replace(busy, waiting=waiting)], 0)) is not None
    ]
    # Four of eight wait before those that move, as many as it decodes; of seven only three do.
    assert asked == [(20, 4, False), (8, 4, False), (7, 4, True), (6, 3, True), (1, 1, True)]
    still_loading = replace(busy, running=0, waiting=2)
    transfer = next_transfer(IDLE, [still_loading], 0)
    assert transfer is not None
    assert not transfer.asks


def test_running_responses_move_beyond_the_plateau_only_and_only_to_one_that_decodes_nothing():
    full = a_holder(unfinished=12, running=12, plateau=8)
    assert next_transfer(IDLE, [full], 0) == Transfer(cause=Cause.OVERFULL, incarnation="a", count=4, asks=True)
    assert next_transfer(replace(IDLE, running=1), [full], 0) is None
    assert next_transfer(IDLE, [replace(full, running=8)], 0) is None
    assert next_transfer(IDLE, [replace(full, plateau=0)], 0) is None
    # Never more than half: the two would change roles.
    assert next_transfer(IDLE, [replace(full, plateau=1)], 0) == Transfer(
        cause=Cause.OVERFULL, incarnation="a", count=6, asks=True
    )


def test_a_slow_member_gives_half_and_one_that_stands_still_gives_all():
    slow, quick = (
        a_holder("a", unfinished=4, running=4, tokens_per_s=20.0),
        a_holder("b", running=2, tokens_per_s=200.0),
    )
    fast_seeker = Seeker(room=8, running=0, tokens_per_s=(100.0,) * 9)
    half = Transfer(cause=Cause.LATE, incarnation="a", count=2, asks=True)
    assert next_transfer(fast_seeker, [slow, quick], 0) == half
    assert next_transfer(IDLE, [slow, quick], 0) == half
    assert next_transfer(Seeker(room=8, running=0, tokens_per_s=(9.0,) * 9), [slow, quick], 0) is None
    still = replace(slow, tokens_per_s=0.0)
    assert next_transfer(IDLE, [still], 0) == Transfer(cause=Cause.LATE, incarnation="a", count=4, asks=True)
    assert next_transfer(IDLE, [replace(slow, tokens_per_s=None)], 0) is None


def test_unstarted_ones_are_taken_from_the_end_and_running_ones_where_least_is_lost():
    waiting = [a_candidate(1, begun=True, length=9), a_candidate(2), a_candidate(3), a_candidate(4)]
    assert choose(Cause.UNSTARTED, 2, waiting) == (4, 3)
    running = [a_candidate(r, begun=True, length=length) for r, length in ((1, 30), (2, 10), (3, 20))]
    assert choose(Cause.OVERFULL, 2, running) == (2, 3)
    assert choose(Cause.LATE, 1, [*running, a_candidate(4)]) == (2,)
    foretold = [replace(candidate, left=candidate.length + 1.0) for candidate in running]
    assert choose(Cause.OVERFULL, 2, foretold) == (1, 3)
    assert choose(Cause.RELEASED, 3, [*running, a_candidate(5, released=True)]) == (5,)
    assert choose(Cause.LOST, 3, running) == (1, 2, 3)


@given(
    st.sampled_from(list(Cause)),
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), max_size=8),
    st.integers(0, 9),
)
def test_a_member_never_takes_back_from_the_living_what_it_has_held(cause, candidates, count):
    made = [
        a_candidate(response, begun=begun, length=length, held_before=held)
        for response, (begun, held, length) in enumerate(candidates)
    ]
    chosen = choose(cause, count, made)
    assert len(set(chosen)) == len(chosen) <= count
    if cause.from_the_living:
        assert not any(made[response].held_before for response in chosen)


@given(
    st.integers(0, 64),
    st.integers(0, 5),
    st.lists(st.tuples(st.booleans(), *[st.integers(0, 20)] * 4, st.floats(0, 99)), max_size=5),
)
def test_no_more_than_there_is_room_for_and_never_nothing(room, unclaimed, figures):
    holders = [
        a_holder(
            str(n), lost=lost, unfinished=a + b, running=a, waiting=b, released=min(c, a), plateau=d, tokens_per_s=rate
        )
        for n, (lost, a, b, c, d, rate) in enumerate(figures)
    ]
    transfer = next_transfer(Seeker(room=room, running=0), holders, unclaimed)
    if transfer is not None:
        assert 1 <= transfer.count <= room


@pytest.mark.parametrize("cause", [Cause.UNCLAIMED, Cause.LOST, Cause.RELEASED])
def test_what_is_free_may_be_taken_back(cause):
    mine = a_candidate(1, held_before=True, released=True)
    assert choose(cause, 1, [mine]) == (1,)


def test_who_takes_only_what_is_free_leaves_the_living_alone():
    modest = replace(IDLE, free_only=True)
    busy = a_holder("a", unfinished=20, running=12, waiting=8, plateau=4, tokens_per_s=0.0)
    assert next_transfer(IDLE, [busy], 0) is not None
    assert next_transfer(modest, [busy], 0) is None
    assert next_transfer(modest, [busy], 3) == Transfer(cause=Cause.UNCLAIMED, incarnation=None, count=3)
    lost = a_holder("b", lost=True, unfinished=2)
    assert next_transfer(modest, [busy, lost], 0) == Transfer(cause=Cause.LOST, incarnation="b", count=2)
    released = replace(busy, released=2)
    assert next_transfer(modest, [released], 0) == Transfer(cause=Cause.RELEASED, incarnation="a", count=2)


def test_unstarted_work_of_an_isolated_member_goes_to_idle_members_only():
    tail = a_holder("a", unfinished=6, running=2, waiting=4, isolated=True)
    assert next_transfer(IDLE, [tail], 0) == Transfer(cause=Cause.UNSTARTED, incarnation="a", count=2)
    busy = replace(IDLE, running=3)
    assert next_transfer(busy, [tail], 0) is None
    other = a_holder("b", unfinished=3, running=1, waiting=2)
    assert next_transfer(busy, [tail, other], 0) == Transfer(cause=Cause.UNSTARTED, incarnation="b", count=1)


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
