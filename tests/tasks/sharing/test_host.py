"""A host from its first heartbeat to its last: scripted workers, and a clock at which the test makes things happen."""

import heapq
import itertools
import logging

import pytest

from storage import fleet_layout, layout, records
from storage.clock import ManualClock
from storage.fleet_records import DueRecord, HostBeat, LeftRecord, SpentRecord
from storage.local import LocalStore
from storage.memory import MemoryStore, NestedStore
from storage.records import RunRecord
from storage.seats import newest_seat, take_seat
from storage.store import StoreDenied, StoreUnavailable
from tasks.sharing.billing import bill, total_s
from tasks.sharing.host import Host, HostSettings
from tasks.sharing.workers import Restored, WorkerState
from tests.fleet_records import FLEET, TTL_S, a_beat, a_host, a_run

A, B, C = (a_run(name, state_bytes=4) for name in "abc")
RUN = RunRecord(config={}, digest="0" * 32, vocab_size=1, model_files={}, created_at_s=0.0)
SWITCH_S, TRAIN_S, PARK_S, PUBLISH_S, READ_S = 2.0, 10.0, 1.0, 5.0, 4.0


class EventfulClock(ManualClock):
    """While it sleeps, what was scheduled happens."""

    def __init__(self):
        super().__init__(500.0)
        self.agenda, self.numbers = [], itertools.count()

    def at(self, when_s, action):
        heapq.heappush(self.agenda, (500.0 + when_s, next(self.numbers), action))

    def sleep(self, duration_s):
        until_s = self.monotonic() + duration_s
        while self.agenda and self.agenda[0][0] <= until_s:
            at_s, _, action = heapq.heappop(self.agenda)
            self.advance(max(0.0, at_s - self.monotonic()))
            action()
        self.advance(max(0.0, until_s - self.monotonic()))


class ScriptedWorkers:
    """Phases of fixed duration. hang: runs whose training does not end. fail: runs whose next training fails.

    prefetched: (run, iteration, second) of each state that is to be read ahead, which takes READ_S.
    """

    def __init__(self, clock, store_of):
        self.clock, self.store_of = clock, store_of
        self.begun, self.evicted, self.killed = [], [], []
        self.at, self.digests, self.hang, self.fail = {}, {}, set(), set()
        self.failed, self.reads = {}, {}
        self.prefetched, self.onto_disk, self.dropped = [], [], []

    def begin(self, run, iteration, *, onto_disk):
        assert not any(self.state(name).has_device for name in self.at)
        assert self.state(run.id).phase != "prefetching"
        self.reads.pop(run.id, None)
        if onto_disk:
            self.onto_disk.append((run.run_url[-1], iteration))
        self.begun.append((run.run_url[-1], iteration, self.clock.monotonic() - 500.0))
        self.at[run.id] = (self.clock.monotonic(), run, iteration)
        self.failed.pop(run.id, None)

    def prefetch(self, run, iteration):
        assert not self.state(run.id).is_busy
        self.prefetched.append((run.run_url[-1], iteration, self.clock.monotonic() - 500.0))
        self.at.pop(run.id, None)
        self.reads[run.id] = (self.clock.monotonic(), run, iteration)

    def drop_copy(self, run_id):
        self.dropped.append(run_id)

    def read_ahead(self, since_s, run, iteration):
        if self.clock.monotonic() < since_s + READ_S:
            return WorkerState(phase="prefetching", iteration=iteration)
        how = Restored(tier="object store", seconds=READ_S, num_bytes=run.state_bytes, ahead=True)
        return WorkerState(phase="parked", iteration=iteration, bytes_held=run.state_bytes, restored=how)

    def state(self, run_id):
        if run_id in self.failed:
            return WorkerState(phase="failed", message=self.failed[run_id])
        if run_id in self.reads:
            return self.read_ahead(*self.reads[run_id])
        if run_id not in self.at:
            return WorkerState()
        since_s, run, iteration = self.at[run_id]
        passed_s = self.clock.monotonic() - since_s
        if run_id in self.fail and passed_s > SWITCH_S:
            self.fail.discard(run_id)
            del self.at[run_id]
            self.failed[run_id] = "it broke"
            return self.state(run_id)
        train_s = 1e9 if run_id in self.hang else TRAIN_S
        phases = (("restoring", SWITCH_S), ("training", train_s), ("parking", PARK_S), ("publishing", PUBLISH_S))
        for phase, duration_s in phases:
            if passed_s < duration_s:
                held = run.state_bytes if phase == "publishing" else 0
                return WorkerState(phase=phase, iteration=iteration, bytes_held=held)
            passed_s -= duration_s
        self.store_of(run).put(layout.manifest(layout.weights(iteration + 1)), b"m")
        return WorkerState(phase="parked", iteration=iteration, bytes_held=run.state_bytes)

    def evict(self, run_id):
        assert not self.state(run_id).has_device
        self.evicted.append(run_id)
        self.at.pop(run_id, None)
        self.reads.pop(run_id, None)

    def kill(self, run_id):
        self.killed.append(run_id)
        self.hang.discard(run_id)
        self.at.pop(run_id, None)
        self.failed[run_id] = "killed"


class Stage:
    """A fleet with one production host, and what its runs do at which second."""

    def __init__(self, true):
        self.clock, self.true = EventfulClock(), true
        self.fleet = NestedStore(self.true, "fleet")
        self.refused = {}
        self.workers = ScriptedWorkers(self.clock, self.store_of)
        self.told = False

    def store_of(self, run):
        return NestedStore(self.true, run.run_url[-1])

    def open(self, url):
        if url[-1] in self.refused:
            raise self.refused[url[-1]]
        return NestedStore(self.true, url[-1])

    def admit(self, *runs, exist=True):
        for run in runs:
            records.put(self.fleet, fleet_layout.admitted(run.id), run)
            if exist:
                records.put(self.store_of(run), layout.RUN, RUN)

    def due(self, run, iteration, at_s=0.0):
        record = DueRecord(iteration=iteration, groups=1)
        self.clock.at(at_s, lambda: records.put(self.store_of(run), layout.due(iteration), record))

    def plan(self, run, iteration, at_s=0.0):
        self.clock.at(at_s, lambda: self.store_of(run).put(layout.plan(iteration), b"planned"))

    def play(self, until_s, memory_bytes=100, disk_bytes=0, fleet=None, **settings):
        def tell():
            self.told = True

        self.clock.at(until_s, tell)
        host = Host(
            fleet or self.fleet,
            FLEET,
            a_host("me", memory_bytes, disk_bytes),
            HostSettings(poll_interval_s=1.0, look_interval_s=5.0, **settings),
            self.workers,
            self.clock,
            open_store=self.open,
            is_told_to_end=lambda: self.told,
        )
        host.run()
        return self.begun

    @property
    def begun(self):
        return [(run, iteration) for run, iteration, _ in self.workers.begun]

    @property
    def spent(self):
        return [records.read(self.fleet, SpentRecord, key) for key in self.fleet.list(fleet_layout.spent_by("me"))]

    @property
    def beat(self):
        return records.read(self.fleet, HostBeat, fleet_layout.alive("me"))


@pytest.fixture
def stage():
    return Stage(MemoryStore("true"))


def test_a_phase_is_trained_when_it_is_due_and_the_next_while_it_publishes(stage):
    stage.admit(A, B)
    stage.due(A, 0, at_s=20)
    stage.due(B, 0, at_s=22)
    stage.due(A, 1, at_s=60)
    assert stage.play(100) == [("a", 0), ("b", 0), ("a", 1)]
    times = [at_s for _, _, at_s in stage.workers.begun]
    assert 20 <= times[0] <= 22
    assert times[1] - times[0] <= SWITCH_S + TRAIN_S + PARK_S + 1
    assert 60 <= times[2] <= 62


def test_a_fleet_and_its_runs_may_lie_in_a_directory(tmp_path):
    stage = Stage(LocalStore(tmp_path))
    stage.admit(A)
    stage.due(A, 0, at_s=5)
    assert stage.play(10) == [("a", 0)]
    assert stage.beat.state == "gone"


def test_a_host_that_has_ended_says_so_and_has_billed_every_second(stage):
    stage.admit(A, B)
    stage.due(A, 0, at_s=20)
    stage.play(100, spent_interval_s=7.0)
    assert stage.beat.state == "gone"
    assert set(stage.workers.evicted) == {A.id, B.id}
    billed = bill(stage.spent, stage.beat.lived_s, {A.id: 1.0, B.id: 1.0})
    assert total_s(billed) == pytest.approx(stage.beat.lived_s, abs=1e-9)
    assert billed[A.id]["train"] == pytest.approx(TRAIN_S, abs=1.0)
    assert billed[A.id]["switch"] == pytest.approx(SWITCH_S, abs=1.0)
    assert billed[A.id]["idle"] == billed[B.id]["idle"] > 30


def test_it_ends_at_a_phase_boundary_only(stage):
    stage.admit(A)
    stage.due(A, 0, at_s=20)
    stage.play(23)
    assert stage.beat.lived_s >= 20 + SWITCH_S + TRAIN_S + PARK_S + PUBLISH_S
    assert stage.store_of(A).get(layout.manifest(layout.weights(1)))


def test_it_ends_after_its_hours(stage):
    stage.play(1e9, hours=0.1)
    assert 360 <= stage.beat.lived_s <= 362


def test_a_run_that_comes_later_is_waited_for(stage):
    stage.admit(A, exist=False)
    stage.clock.at(30, lambda: records.put(stage.store_of(A), layout.RUN, RUN))
    stage.due(A, 0, at_s=40)
    assert stage.play(80) == [("a", 0)]


@pytest.mark.parametrize(
    "error", [StoreDenied("403"), StoreUnavailable("no answer"), ValueError("no url"), OSError("no host")]
)
def test_a_run_that_cannot_be_reached_is_logged_once_and_stops_no_other(stage, caplog, error):
    stage.admit(A, B)
    stage.refused["a"] = error
    stage.due(B, 0, at_s=20)
    with caplog.at_level(logging.WARNING):
        assert stage.play(100) == [("b", 0)]
    assert len([each for each in caplog.records if "going on" in each.message]) == 1


def test_a_run_of_another_format_stops_no_other(stage):
    stage.admit(A, B)
    stage.store_of(A).put(layout.RUN, b'{"format":99}')
    stage.due(A, 0)
    stage.due(B, 0, at_s=20)
    assert stage.play(100) == [("b", 0)]


def test_a_fleet_that_is_denied_for_a_while_is_served_on(stage, caplog):
    class Denied(NestedStore):
        """Refuses everything in the second from 30 to 60."""

        def _refuse(self):
            if 30 <= stage.clock.monotonic() - 500 < 60:
                raise StoreDenied("403")

        def put(self, key, body):
            self._refuse()
            super().put(key, body)

        def list(self, prefix, after=""):
            self._refuse()
            return super().list(prefix, after)

    stage.admit(A)
    stage.due(A, 0, at_s=70)
    with caplog.at_level(logging.WARNING):
        assert stage.play(120, fleet=Denied(stage.true, "fleet")) == [("a", 0)]
    assert len([each for each in caplog.records if "heartbeat: StoreDenied" in each.message]) == 1


def test_a_phase_that_takes_a_multiple_of_its_expectation_is_killed_and_repeated(stage, caplog):
    stage.admit(A, B)
    stage.workers.hang.add(A.id)
    stage.due(A, 0, at_s=20)
    stage.due(B, 0, at_s=25)
    with caplog.at_level(logging.ERROR):
        stage.play(200, overtime=3.0, overtime_s_min=10.0)
    assert sorted(stage.begun) == [("a", 0), ("a", 0), ("b", 0)]
    assert stage.workers.killed == [A.id]
    assert "its worker is killed" in caplog.text


def test_a_worker_that_fails_is_begun_again_later_and_stops_no_other(stage, caplog):
    stage.admit(A, B)
    stage.workers.fail.add(A.id)
    stage.due(A, 0, at_s=20)
    stage.due(B, 0, at_s=22)
    with caplog.at_level(logging.ERROR):
        stage.play(120)
    assert sorted(stage.begun) == [("a", 0), ("a", 0), ("b", 0)]
    assert "it broke" in caplog.text


def test_a_seat_that_was_lost_is_noticed_before_a_phase_begins_and_its_worker_is_ended(stage):
    stage.admit(A, B)
    stage.due(A, 0, at_s=10)
    # Between two looks another host takes the seat, and beats on.
    stage.clock.at(41.5, lambda: take_seat(stage.fleet, A.id, newest_seat(stage.fleet, A.id).epoch, "other"))
    for second in range(40, 100, 2):
        beat = a_beat("other", second)
        stage.clock.at(second, lambda beat=beat: records.put(stage.fleet, fleet_layout.alive("other"), beat))
    stage.due(A, 1, at_s=41.6)
    assert stage.play(95) == [("a", 0)]
    assert A.id in stage.workers.evicted


def test_a_run_that_leaves_while_it_trains_ends_its_phase_first(stage):
    stage.admit(A)
    stage.due(A, 0, at_s=10)
    left = LeftRecord(id=A.id, reason="done", left_at_s=0.0)
    stage.clock.at(14, lambda: records.put(stage.fleet, fleet_layout.left(A.id), left))
    stage.due(A, 1, at_s=40)
    assert stage.play(80) == [("a", 0)]
    assert stage.workers.evicted == [A.id]
    assert stage.store_of(A).get(layout.manifest(layout.weights(1)))


def test_a_run_that_leaves_while_its_phase_hangs_is_killed_and_its_worker_ended(stage):
    """In history 313 a host died of this."""
    stage.admit(A, B)
    stage.workers.hang.add(A.id)
    stage.due(A, 0, at_s=10)
    stage.due(B, 0, at_s=12)
    left = LeftRecord(id=A.id, reason="done", left_at_s=0.0)
    stage.clock.at(14, lambda: records.put(stage.fleet, fleet_layout.left(A.id), left))
    assert stage.play(120, overtime_s_min=30.0, overtime=1.0) == [("a", 0), ("b", 0)]
    assert (stage.workers.killed, stage.workers.evicted[0]) == ([A.id], A.id)


def test_where_memory_is_short_the_state_that_is_expected_to_be_needed_last_is_dropped(stage):
    runs = [a_run(name, state_bytes=4, cycle_s=cycle_s) for name, cycle_s in (("a", 100.0), ("b", 300.0), ("c", 90.0))]
    stage.admit(*runs)
    for number, run in enumerate(runs):
        stage.due(run, 0, at_s=20 + 30 * number)
    stage.play(115, memory_bytes=9)
    assert stage.begun == [("a", 0), ("b", 0), ("c", 0)]
    # b has trained last, and comes again last.
    assert stage.workers.evicted[0] == runs[1].id
    assert not stage.workers.onto_disk


def test_states_that_do_not_fit_in_memory_are_copied_onto_the_disk_as_far_as_that_holds_them(stage):
    stage.admit(A, B, C)
    for number, run in enumerate((A, B, C)):
        stage.due(run, 0, at_s=20 + 30 * number)
    stage.play(115, memory_bytes=9, disk_bytes=8)
    assert stage.workers.onto_disk == [("a", 0), ("b", 0), ("c", 0)]
    # The third copy takes the place of one of the two before.
    assert stage.workers.dropped[0] in (A.id, B.id)


def test_states_that_fit_in_memory_are_not_copied(stage):
    stage.admit(A, B)
    stage.due(A, 0, at_s=20)
    stage.play(60, memory_bytes=9, disk_bytes=100)
    assert stage.workers.onto_disk == []


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


def test_nothing_is_read_ahead_for_which_memory_has_no_room_beside_the_phase_that_trains(stage):
    stage.admit(A, B)
    stage.due(A, 0, at_s=20)
    stage.due(B, 0, at_s=22)
    stage.play(100, memory_bytes=7)
    assert stage.workers.prefetched == []
    assert stage.begun == [("a", 0), ("b", 0)]


def test_while_it_trains_it_beats_far_more_often_than_the_ttl(stage):
    beats = []

    class Noting(NestedStore):
        def put(self, key, body):
            beats.append(stage.clock.monotonic())
            super().put(key, body)

    stage.admit(A)
    stage.due(A, 0, at_s=10)
    stage.play(60, fleet=Noting(stage.true, "fleet"))
    assert max(after - before for before, after in itertools.pairwise(beats)) < TTL_S / 4
