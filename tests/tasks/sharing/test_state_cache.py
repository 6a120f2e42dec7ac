"""Where a host keeps the states of its runs, and when it reads one ahead."""

import pytest

from storage.stores.memory import MemoryStore
from tests.fleet_records import a_run
from tests.host_stage import READ_S, A, B, Stage


@pytest.fixture
def stage():
    return Stage(MemoryStore("true"))


def test_where_memory_is_short_the_state_that_is_expected_to_be_needed_last_is_dropped(stage):
    runs = [a_run(name, state_bytes=4, cycle_s=cycle_s) for name, cycle_s in (("a", 100.0), ("b", 300.0), ("c", 90.0))]
    stage.admit(*runs)
    for number, run in enumerate(runs):
        stage.due(run, 0, at_s=20 + 30 * number)
    stage.play(115, memory_bytes=9)
    assert stage.begun == [("a", 0), ("b", 0), ("c", 0)]
    # b has trained last, and comes again last.
    assert stage.workers.evicted[0] == runs[1].id


def test_while_one_run_trains_the_state_of_the_next_is_read_ahead_and_its_phase_waits_for_that(stage):
    stage.admit(A, B)
    stage.due(A, 0, at_s=20)
    stage.due(B, 0, at_s=22)
    stage.play(100)
    [a_began_s, b_began_s] = [at_s for _, _, at_s in stage.workers.begun]
    assert [(run, iteration) for run, iteration, _ in stage.workers.prefetched] == [("b", 0)]
    assert a_began_s < stage.workers.prefetched[0][2] < b_began_s
    [found] = [each for record in stage.spent for each in record.restored]
    assert (found.run, found.iteration, found.tier, found.ahead) == (B.id, 0, "object store", True)
    assert (found.seconds, found.num_bytes) == (READ_S, B.state_bytes)


def test_the_state_of_a_planned_run_is_read_ahead_once_and_the_device_stays_free_for_others(stage):
    stage.admit(A, B)
    stage.plan(A, 0, at_s=6)
    stage.due(A, 0, at_s=11.5)
    stage.due(B, 0, at_s=11.6)
    stage.play(80)
    [(run, iteration, at_s)] = stage.workers.prefetched
    assert (run, iteration) == ("a", 0)
    assert stage.begun == [("b", 0), ("a", 0)]
    assert stage.workers.begun[0][2] < at_s + READ_S


def test_a_state_that_could_not_be_read_ahead_is_left_to_its_phase(stage):
    stage.workers.unreadable.add(A.id)
    stage.admit(A)
    stage.plan(A, 0, at_s=6)
    stage.due(A, 0, at_s=50)
    stage.play(80)
    assert [(run, iteration) for run, iteration, _ in stage.workers.prefetched] == [("a", 0)]
    assert stage.begun == [("a", 0)]


def test_the_state_that_is_read_ahead_is_that_of_the_iteration_that_is_trained_next(stage):
    stage.admit(A, B)
    for iteration in (0, 1):
        stage.plan(A, iteration, at_s=6 + 40 * iteration)
    stage.due(A, 0, at_s=20)
    # What A has parked leaves when it is told so, so that its next state is read.
    stage.clock.at(42, lambda: stage.workers.evict(A.id))
    stage.play(80)
    assert [(run, iteration) for run, iteration, _ in stage.workers.prefetched] == [("a", 0), ("a", 1)]


def test_nothing_is_read_ahead_for_which_memory_has_no_room_beside_the_phase_that_trains(stage):
    stage.admit(A, B)
    stage.due(A, 0, at_s=20)
    stage.due(B, 0, at_s=22)
    stage.play(100, memory_bytes=7)
    assert stage.workers.prefetched == []
    assert stage.begun == [("a", 0), ("b", 0)]
