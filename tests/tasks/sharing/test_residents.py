from hypothesis import given
from hypothesis import strategies as st

from tasks.sharing.residents import Move, Resident, is_usable, make_room

DIGEST, OTHER = "0" * 32, "1" * 32


def resident(run, num_bytes, needed_s=0.0, tier="host memory", busy=False):
    return Resident(run=run, tier=tier, num_bytes=num_bytes, needed_s=needed_s, busy=busy)


RESIDENTS = st.lists(
    st.builds(
        resident,
        st.text("abcdef", min_size=1, max_size=3),
        st.integers(0, 10),
        st.floats(0, 100),
        st.sampled_from(["device", "host memory", "local disk"]),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda one: one.run,
)


def test_a_state_is_usable_only_if_it_equals_the_checkpoint():
    assert is_usable(DIGEST, DIGEST)
    assert not is_usable(OTHER, DIGEST)
    assert not is_usable(None, DIGEST)


def test_nothing_moves_while_there_is_room():
    assert make_room([resident("a", 3), resident("b", 3)], 4, memory_bytes=10) == ()


def test_the_least_recently_needed_state_goes_first_and_to_the_disk_if_there_is_one():
    states = [resident("new", 4, 9.0), resident("old", 4, 1.0), resident("middle", 2, 5.0)]
    assert make_room(states, 4, memory_bytes=10) == (Move("old", "object store"),)
    assert make_room(states, 4, memory_bytes=10, disk_bytes=4) == (Move("old", "local disk"),)
    assert make_room(states, 5, memory_bytes=10, disk_bytes=4) == (
        Move("old", "object store"),
        Move("middle", "local disk"),
    )


def test_what_no_longer_fits_on_the_disk_is_dropped_from_there():
    states = [resident("on disk", 4, 0.5, "local disk"), resident("old", 4, 1.0), resident("new", 4, 9.0)]
    assert make_room(states, 4, memory_bytes=8, disk_bytes=4) == (
        Move("on disk", "object store"),
        Move("old", "local disk"),
    )


def test_busy_states_stay():
    assert make_room([resident("a", 9, busy=True)], 9, memory_bytes=10) == ()


@given(states=RESIDENTS, num_bytes=st.integers(0, 12), memory=st.integers(0, 30), disk=st.integers(0, 20))
def test_afterwards_every_tier_holds_what_it_can_hold(states, num_bytes, memory, disk):
    moves = {move.run: move.tier for move in make_room(states, num_bytes, memory_bytes=memory, disk_bytes=disk)}
    after = {one.run: moves.get(one.run, one.tier) for one in states}
    by_run = {one.run: one for one in states}
    assert not any(by_run[run].busy or by_run[run].tier == "device" for run in moves)
    for tier, capacity in (("host memory", memory - num_bytes), ("local disk", disk)):
        held = [by_run[run] for run, where in after.items() if where == tier and by_run[run].num_bytes]
        assert sum(one.num_bytes for one in held) <= max(0, capacity) or all(one.busy for one in held)
