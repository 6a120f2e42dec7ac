from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from storage.fleet.fleet_records import Prediction
from tasks.sharing.seat_placement import HostRoom, load, place
from tests.fleet_records import a_run

NAMES = st.sampled_from([f"run-{number}" for number in range(12)])
RUNS = st.lists(
    st.builds(a_run, NAMES, phase_s=st.floats(1, 100), cycle_s=st.floats(100, 1000), state_bytes=st.integers(0, 12)),
    max_size=6,
    unique_by=lambda run: run.id,
)
MEMORIES = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20), max_size=4)


def rooms(memories, seated=()):
    """A room for each host; the seated runs are dealt in turn."""
    names = sorted(memories)
    return [
        HostRoom(host=name, memory_bytes=memories[name], seated=tuple(seated[number :: len(names)]))
        for number, name in enumerate(names)
    ]


def test_a_run_goes_where_the_least_load_is_expected():
    busy, idle = HostRoom(host="a", memory_bytes=9, seated=(a_run("x"),)), HostRoom(host="b", memory_bytes=9)
    assert place([a_run("y")], [busy, idle]) == {a_run("y").id: "b"}


def test_several_free_seats_are_spread_by_load():
    heavy, light, lighter = a_run("h", phase_s=20.0), a_run("l", phase_s=9.0), a_run("m", phase_s=8.0)
    placed = place([lighter, light, heavy], rooms({"a": 9, "b": 9}))
    assert placed == {heavy.id: "a", light.id: "b", lighter.id: "b"}


def test_memory_that_holds_all_states_comes_before_load():
    crowded, busy = HostRoom(host="a", memory_bytes=9, seated=(a_run("x", state_bytes=5, phase_s=1.0),)), a_run("y")
    roomy = HostRoom(host="b", memory_bytes=20, seated=(busy,))
    run = a_run("z", state_bytes=6)
    assert place([run], [crowded, roomy]) == {run.id: "b"}
    assert place([run], [crowded]) == {run.id: "a"}
    assert place([a_run("z", state_bytes=30)], [crowded, roomy]) == {}
    # What fills the memory to its last byte is held by it.
    assert place([a_run("z", state_bytes=4)], [crowded, roomy]) == {run.id: "a"}


@given(free=RUNS, memories=MEMORIES)
def test_every_host_computes_the_same_from_the_same_records(free, memories):
    found = place(free, rooms(memories))
    assert place(list(reversed(free)), list(reversed(rooms(memories)))) == found


@given(free=RUNS, memories=MEMORIES)
def test_a_run_is_placed_exactly_if_some_host_can_hold_it(free, memories):
    placed = place(free, rooms(memories))
    assert {run.id for run in free if run.state_bytes <= max(memories.values(), default=-1)} == placed.keys()
    assert all(memories[placed[run.id]] >= run.state_bytes for run in free if run.id in placed)


@given(free=RUNS, hosts=st.integers(1, 4))
def test_loads_differ_by_no_more_than_one_run_where_memory_is_ample(free, hosts):
    ample = rooms({"abcd"[number]: 1000 for number in range(hosts)})
    placed = place(free, ample)
    loads = [load(run for run in free if placed[run.id] == room.host) for room in ample]
    assert max(loads) - min(loads) <= max((run.load for run in free), default=0.0) + 1e-9


def test_a_host_holds_runs_whose_states_fit_in_its_memory_together():
    runs = [a_run(str(size), state_bytes=size) for size in (2, 3, 4)]
    assert HostRoom(host="a", memory_bytes=9).holds(runs)
    assert not HostRoom(host="a", memory_bytes=8).holds(runs)


def predicted_on(host, name, **fields):
    return a_run(name, predicted=Prediction(host=host, slowdowns={}), **fields)


def test_a_run_goes_to_the_host_for_which_it_was_admitted_while_that_lives():
    busy, idle = HostRoom(host="a", memory_bytes=9, seated=(a_run("x"),)), HostRoom(host="b", memory_bytes=9)
    run = predicted_on("a", "y")
    assert place([run], [busy, idle]) == {run.id: "a"}
    assert place([run], [idle]) == {run.id: "b"}
    assert place([predicted_on(None, "y")], [busy, idle]) == {run.id: "b"}
    too_large = predicted_on("a", "y", state_bytes=10)
    assert place([too_large], [busy, HostRoom(host="b", memory_bytes=10)]) == {run.id: "b"}


def test_a_run_goes_to_a_host_with_a_device_for_each_rank_and_to_no_other():
    small, large = (
        HostRoom(host="a", memory_bytes=9),
        HostRoom(host="b", memory_bytes=9, devices=2, seated=(a_run("x"),)),
    )
    one, two, four = a_run("1"), a_run("2", ranks=2), predicted_on("b", "4", ranks=4)
    assert place([one, two, four], [small, large]) == {one.id: "a", two.id: "b"}
    assert place([one, two, four], [large]) == {two.id: "b"}


def test_runs_of_which_no_host_was_predicted_see_the_load_of_the_others():
    light, heavy = predicted_on("a", "l", phase_s=5.0), a_run("h", phase_s=20.0)
    assert place([heavy, light], rooms({"a": 9, "b": 9})) == {light.id: "a", heavy.id: "b"}


@given(free=RUNS, memories=MEMORIES, hosts=st.lists(st.sampled_from("abcdx"), min_size=6, max_size=6))
def test_admission_and_placement_never_disagree_about_a_host_that_can_hold_the_state(free, memories, hosts):
    runs = [
        replace(run, predicted=Prediction(host=host, slowdowns={}))
        for run, host in zip(free, hosts[: len(free)], strict=True)
    ]
    placed = place(runs, rooms(memories))
    assert place(runs[::-1], rooms(memories)[::-1]) == placed
    for run in runs:
        if memories.get(run.predicted.host, -1) >= run.state_bytes:
            assert placed[run.id] == run.predicted.host
