from hypothesis import given
from hypothesis import strategies as st

from tasks.sharing.residents import Resident, choose_prefetch, expected_s, has_room, is_usable, make_room

DIGEST, OTHER = "0" * 32, "1" * 32


def resident(run, num_bytes, needed_s=0.0, state_bytes=4, busy=False):
    return Resident(run=run, num_bytes=num_bytes, state_bytes=state_bytes, needed_s=needed_s, busy=busy)


RESIDENTS = st.lists(
    st.builds(
        resident,
        st.text("abcdef", min_size=1, max_size=3),
        st.integers(0, 10),
        st.floats(0, 100),
        st.integers(1, 10),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda one: one.run,
)


def always(_):
    return True


def test_a_state_is_usable_only_if_it_equals_the_checkpoint():
    assert is_usable(DIGEST, DIGEST)
    assert not is_usable(OTHER, DIGEST)
    assert not is_usable(None, DIGEST)


def test_nothing_leaves_while_there_is_room():
    assert make_room([resident("a", 3), resident("b", 3)], 4, 10) == ()


def test_the_state_that_is_needed_last_leaves_first():
    states = [resident("soon", 4, 1.0), resident("last", 4, 9.0), resident("middle", 2, 5.0)]
    assert make_room(states, 4, 10) == ("last",)
    assert make_room(states, 5, 10) == ("last", "middle")


def test_busy_states_stay():
    assert make_room([resident("a", 9, busy=True)], 9, 10) == ()
    assert not has_room([resident("a", 9, busy=True)], 9, 10)
    assert has_room([resident("a", 9)], 9, 10)


@given(states=RESIDENTS, num_bytes=st.integers(0, 12), capacity=st.integers(0, 30))
def test_afterwards_a_tier_holds_what_it_can_hold(states, num_bytes, capacity):
    going = make_room(states, num_bytes, capacity)
    by_run = {one.run: one for one in states}
    assert not any(by_run[run].busy for run in going)
    stay = [one for one in states if one.run not in going and one.num_bytes]
    assert sum(one.num_bytes for one in stay) + num_bytes <= capacity or all(one.busy for one in stay)


def test_a_run_that_has_ended_is_expected_ever_later():
    assert expected_s(10, 30, 20) == 40
    assert expected_s(10, 30, 45) == 50
    assert expected_s(10, 30, 1000) == 1960


def test_the_first_run_to_be_needed_is_read_ahead_and_the_last_one_makes_room():
    states = [resident("now", 4, 0.0, busy=True), resident("next", 0, 1.0), resident("last", 4, 9.0)]
    assert choose_prefetch(states, 12, always) == ("next", ())
    assert choose_prefetch(states, 8, always) == ("next", ("last",))
    assert choose_prefetch(states, 7, always) is None


def test_a_state_that_is_needed_sooner_does_not_leave_for_one_that_is_needed_later():
    states = [resident("sooner", 4, 1.0), resident("later", 0, 2.0)]
    assert choose_prefetch(states, 7, always) is None
    assert choose_prefetch(states, 8, always) == ("later", ())


def test_a_run_that_is_not_ready_is_passed_over():
    states = [resident("first", 0, 1.0), resident("second", 0, 2.0)]
    assert choose_prefetch(states, 9, lambda run: run != "first") == ("second", ())
    assert choose_prefetch(states, 9, lambda _: False) is None


@given(states=RESIDENTS, capacity=st.integers(0, 30))
def test_reading_ahead_never_exceeds_memory_and_drops_only_what_is_needed_later(states, capacity):
    chosen = choose_prefetch(states, capacity, always)
    if chosen is not None:
        run, going = chosen
        by_run = {one.run: one for one in states}
        assert not by_run[run].busy
        assert all(by_run[each].needed_s > by_run[run].needed_s and not by_run[each].busy for each in going)
        held = sum(one.num_bytes for one in states if one.run not in going)
        assert held + by_run[run].state_bytes <= capacity
