"""Who takes what from whom: the rules of RLBoost's Algorithm 2, and what is never done."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.crew_model.rebalance import (
    LOOKS_MAX,
    Candidate,
    Cause,
    Holder,
    Seeker,
    Transfer,
    Transfers,
    choose,
    free_share,
    next_transfer,
    should_cut,
)

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


def from_the_lost(count: int) -> Transfer:
    return Transfer(cause=Cause.LOST, incarnation="a", count=count)


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
    holders = [
        a_holder("a", lost=True, unfinished=9),
        a_holder("b", idle=True, room=8),
        a_holder("c", idle=True, room=8),
    ]
    assert next_transfer(IDLE, holders, 0) == Transfer(cause=Cause.LOST, incarnation="a", count=3)
    assert next_transfer(replace(IDLE, room=2), holders, 0) == Transfer(cause=Cause.LOST, incarnation="a", count=2)


def test_of_what_is_free_a_member_takes_only_what_makes_it_as_full_as_those_with_room():
    lost, busy = a_holder("a", lost=True, unfinished=9), a_holder("b", unfinished=7, running=7, room=9)
    roomy = Seeker(room=20, running=3, held=4)
    # Twenty responses for two, of which it holds four.
    assert next_transfer(roomy, [lost, busy], 0) == from_the_lost(6)
    assert next_transfer(replace(roomy, room=2), [lost, busy], 0) == from_the_lost(2)
    # What is free elsewhere counts, too: twenty-eight for two, but the other one has room for nine.
    assert free_share(roomy, [lost, busy], 8) == 10
    assert free_share(roomy, [lost, replace(busy, room=2)], 8) == 15
    # Whoever holds more than the others leaves it to them, except for one, in case they do not look.
    assert next_transfer(replace(roomy, held=30), [lost, busy], 0) == from_the_lost(1)
    # Members without room do not count, however little they hold.
    assert next_transfer(replace(roomy, held=30), [lost, replace(busy, room=0)], 0) == from_the_lost(9)


def test_what_a_holder_was_asked_for_is_not_divided():
    asked = a_holder("a", unfinished=60, running=60, released=30)
    others = [a_holder(str(n), unfinished=2, running=2, room=62) for n in range(9)]
    transfer = next_transfer(Seeker(room=64, running=0), [asked, *others], 0)
    assert transfer == Transfer(cause=Cause.RELEASED, incarnation="a", count=30)


def test_who_takes_only_what_is_free_fills_its_batch():
    lost, busy = a_holder("a", lost=True, unfinished=9), a_holder("b", unfinished=7, running=7, room=9)
    leaving = Seeker(room=8, running=4, held=4, free_only=True)
    assert next_transfer(leaving, [lost, busy], 0) == from_the_lost(8)
    assert next_transfer(leaving, [lost, busy, a_holder("c", idle=True, room=8)], 0) == from_the_lost(5)


def looks(
    held: dict[str, int], most: dict[str, int], lost: list[int], unclaimed: int = 0
) -> tuple[dict[str, int], int]:
    """What the members hold when nothing is free any more, and after how many rounds; all look in turn.

    most: responses that each decodes together. lost: what each lost member holds.
    """
    held, heaps = dict(held), {f"lost {n}": count for n, count in enumerate(lost)}
    for rounds in range(1, 50):
        for name in held:
            holders = {
                other: a_holder(other, unfinished=n, running=n, idle=not n, room=most[other] - n)
                for other, n in held.items()
                if other != name
            }
            holders |= {heap: a_holder(heap, lost=True, unfinished=n) for heap, n in heaps.items() if n}
            seeker = Seeker(room=most[name] - held[name], running=held[name], held=held[name])
            turns = Transfers(seeker, holders, unclaimed)
            while transfer := turns.next():
                assert transfer.cause in (Cause.LOST, Cause.UNCLAIMED)
                held[name] += transfer.count
                if transfer.incarnation is None:
                    unclaimed -= transfer.count
                else:
                    heaps[transfer.incarnation] -= transfer.count
                turns.took(transfer, transfer.count)
        if not unclaimed and not any(heaps.values()):
            return held, rounds
    raise AssertionError(f"left after {rounds} rounds: {unclaimed} and {heaps}")


def test_what_is_free_is_shared_evenly_in_one_round_whoever_looks_first():
    most = dict.fromkeys("abcd", 64)
    held, rounds = looks({"a": 0, "b": 3, "c": 0, "d": 10}, most, [], unclaimed=19)
    assert (held, rounds) == ({"a": 8, "b": 7, "c": 7, "d": 10}, 1)
    # Many small heaps are no more than one large one.
    held, rounds = looks({"a": 0, "b": 3, "c": 0, "d": 10}, most, [1] * 19)
    assert (held, rounds) == ({"a": 8, "b": 7, "c": 7, "d": 10}, 1)
    # Only whoever looks first takes one beyond its share, in case that the others do not look.
    held, rounds = looks({"d": 10, "a": 0, "b": 3, "c": 0}, most, [4] * 4, unclaimed=3)
    assert (held, rounds) == ({"d": 11, "a": 7, "b": 7, "c": 7}, 1)


def test_members_that_one_look_does_not_see_take_their_part_of_what_nobody_has_claimed():
    holders = {str(n): a_holder(str(n), idle=True, room=64) for n in range(LOOKS_MAX)}
    everybody, newcomer = 4 * LOOKS_MAX, Seeker(room=64, running=0)
    unseen = everybody - 1 - LOOKS_MAX
    for seeker in (newcomer, replace(newcomer, free_only=True)):
        seen = Transfers(seeker, holders, 5 * everybody, unseen).next()
        alone = Transfers(seeker, holders, 5 * (1 + LOOKS_MAX)).next()
        assert seen == alone == Transfer(cause=Cause.UNCLAIMED, incarnation=None, count=5)
    # A fraction of a response is one.
    assert free_share(newcomer, holders.values(), 5 * everybody + 1, unseen) == 6
    # What a lost member among those that were seen has left is theirs alone.
    lost = [*holders.values(), a_holder("lost", lost=True, unfinished=2 * (1 + LOOKS_MAX))]
    assert free_share(newcomer, lost, 0, unseen) == 2


def test_members_that_one_look_does_not_see_have_room_as_often_as_those_that_it_sees():
    full = {str(n): a_holder(str(n), unfinished=64, running=64) for n in range(LOOKS_MAX)}
    newcomer, unseen = Seeker(room=64, running=0), 3 * LOOKS_MAX - 1
    assert free_share(newcomer, full.values(), 64, unseen) == 64
    half = {**full, **{str(n): a_holder(str(n), room=64) for n in range(LOOKS_MAX // 2)}}
    # The newcomer and half of the others: 64 in all.
    assert free_share(newcomer, half.values(), 64 * 5, unseen) == 5


def test_members_without_room_hold_nobody_up():
    """One member with a large engine, and six whose small engines are full, although these hold less."""
    held = {"large": 100} | {f"small {n}": 32 for n in range(6)}
    most = {name: 256 if name == "large" else 32 for name in held}
    found, rounds = looks(held, most, [100])
    assert (found["large"], rounds) == (200, 1)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6),
    st.lists(st.integers(1, 20), max_size=6),
    st.integers(0, 40),
)
def test_what_is_free_never_waits_while_somebody_has_room(members, lost, unclaimed):
    rooms = sum(room for _, room in members)
    held = {str(n): own for n, (own, _) in enumerate(members)}
    most = {str(n): own + room for n, (own, room) in enumerate(members)}
    lost = lost[: max(0, rooms // 20)]
    unclaimed = min(unclaimed, rooms - sum(lost))
    found, rounds = looks(held, most, lost, unclaimed)
    assert sum(found.values()) == sum(held.values()) + sum(lost) + unclaimed
    # One round, and a second one for what many small sources left over.
    assert rounds <= 2


def test_what_others_are_to_take_is_no_reason_to_take_what_they_decode():
    lost, busy = a_holder("a", lost=True, unfinished=60), a_holder("b", unfinished=60, running=4, waiting=56, room=9)
    turns = Transfers(Seeker(room=100, running=200, held=200), {"a": lost, "b": busy}, 0)
    first = turns.next()
    assert first is not None
    # The other one has room for nine of them.
    assert (first.cause, first.count) == (Cause.LOST, 51)
    turns.took(first, first.count)
    assert turns.next() is None


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
