"""A host from its first heartbeat to its last."""

import itertools
import logging

import pytest

from storage.fleet import fleet_layout
from storage.fleet.fleet_records import LeftRecord
from storage.fleet.phase_failure import phase_failure
from storage.fleet.seats import newest_seat, take_seat
from storage.records import layout, records
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore, NestedStore
from storage.stores.store import StoreDenied, StoreUnavailable
from tasks.sharing.billing import bill, total_s
from tests.fleet_records import TTL_S, a_beat, a_run
from tests.host_stage import PARK_S, PUBLISH_S, RUN, SWITCH_S, TRAIN_S, A, B, Stage


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


def test_of_two_runs_that_are_due_the_one_that_has_waited_longer_for_its_size_is_next(stage):
    first, large, small = A, a_run("b", phase_s=100.0, cycle_s=300.0), a_run("c", phase_s=5.0)
    for second, run in ((20, first), (22, large), (23, small)):
        stage.admit(run)
        stage.due(run, 0, at_s=second)
    assert stage.play(100) == [("a", 0), ("c", 0), ("b", 0)]


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
    # Its run pays for all of it, also for what comes after the limit, and for the training that follows.
    billed = bill(stage.spent, stage.beat.lived_s, {A.id: 1.0, B.id: 1.0})
    limit_s = max(10.0, 3.0 * A.phase_s)
    assert billed[A.id]["switch"] + billed[A.id]["train"] == pytest.approx(limit_s + SWITCH_S + TRAIN_S, abs=3.0)
    assert billed[B.id]["train"] == pytest.approx(TRAIN_S, abs=1.0)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_phase_that_replays_has_as_much_more_time_as_it_replays_and_its_run_pays_for_it(stage, hangs):
    stage.admit(A)
    stage.workers.replays[A.id] = 4
    if hangs:
        stage.workers.hang.add(A.id)
    stage.due(A, 0, at_s=20)
    limit_s = max(15.0, 1.2 * A.phase_s)
    assert limit_s < 4 * TRAIN_S
    begun = stage.play(500, overtime=1.2, overtime_s_min=15.0)
    assert len(begun) == 1 + hangs
    assert stage.workers.killed == [A.id] * hangs
    if hangs:
        took_s = stage.workers.begun[1][2] - stage.workers.begun[0][2]
        assert 5 * limit_s <= took_s <= 5 * limit_s + 10
    else:
        billed = bill(stage.spent, stage.beat.lived_s, {A.id: 1.0})
        assert billed[A.id]["switch"] == pytest.approx(SWITCH_S + 4 * TRAIN_S, abs=1.0)
        assert billed[A.id]["train"] == pytest.approx(TRAIN_S, abs=1.0)


def test_a_worker_that_fails_is_begun_again_later_and_stops_no_other(stage, caplog):
    stage.admit(A, B)
    stage.workers.fail.add(A.id)
    stage.due(A, 0, at_s=20)
    stage.due(B, 0, at_s=22)
    with caplog.at_level(logging.ERROR):
        stage.play(120)
    assert sorted(stage.begun) == [("a", 0), ("a", 0), ("b", 0)]
    assert "it broke" in caplog.text


def test_after_each_failure_a_run_is_left_alone_for_twice_as_long_and_all_that_are_seated_pay_for_it(stage):
    stage.admit(A, B)
    stage.workers.fail.add(A.id)
    stage.workers.broken.add(A.id)
    stage.due(A, 0, at_s=20)
    stage.clock.at(500, stage.workers.fail.clear)
    stage.due(A, 1, at_s=900)
    stage.clock.at(890, lambda: stage.workers.fail.add(A.id))
    stage.play(935)
    times = [at_s for _, _, at_s in stage.workers.begun]
    gaps_s = [after - before for before, after in itertools.pairwise(times)]
    tried_s = gaps_s[0] - 1
    assert SWITCH_S < tried_s <= SWITCH_S + 2
    pauses_s = [gap_s - tried_s for gap_s in gaps_s]
    again = stage.begun.index(("a", 1))
    # A poll before and after may come on top.
    assert pauses_s[: again - 1] == pytest.approx([min(2.0**n, 120.0) for n in range(again - 1)], abs=2.0)
    assert again >= 8
    # A phase that was published is behind all that.
    assert pauses_s[again] == pytest.approx(1, abs=2.0)
    billed = bill(stage.spent, stage.beat.lived_s, {A.id: 1.0, B.id: 1.0})
    assert billed[A.id]["switch"] == pytest.approx(len(times) * SWITCH_S, abs=len(times))
    assert billed[A.id]["train"] < 2 * TRAIN_S + len(times)
    assert billed[B.id] == {"idle": billed[A.id]["idle"]}
    assert 2 * billed[B.id]["idle"] > sum(pauses_s[: again - 1])


def test_a_failure_that_every_attempt_would_repeat_is_recorded_for_the_runs_own_task_and_not_attempted_again(stage):
    stage.admit(A, B)
    stage.workers.fail.add(A.id)
    stage.workers.lasting.add(A.id)
    stage.due(A, 0, at_s=20)
    stage.due(B, 0, at_s=22)
    stage.play(400)
    assert sorted(stage.begun) == [("a", 0), ("b", 0)]
    assert phase_failure(stage.store_of(A), 0) == "it broke"
    assert phase_failure(stage.store_of(B), 0) is None


def begun_by_b(killed_at_s, due_at_s):
    """When the phases of B begin, beside a run A whose worker is killed then; None: it is not."""
    stage = Stage(MemoryStore("true"))
    stage.admit(A, B)
    for iteration, at_s in enumerate((20.0, 60.0, 100.0)):
        stage.due(A, iteration, at_s=at_s)
        stage.due(B, iteration, at_s=at_s + due_at_s)
    if killed_at_s is not None:
        stage.clock.at(killed_at_s, lambda: stage.workers.kill(A.id))
    begun = stage.play(250)
    assert begun.count(("b", 0)) == begun.count(("b", 1)) == begun.count(("b", 2)) == 1
    again = len(begun) - 6
    return [at_s for run, _, at_s in stage.workers.begun if run == "b"], again


@pytest.mark.parametrize("due_at_s", [-5.0, 2.0, 8.0, 15.0])
def test_a_run_whose_worker_is_killed_delays_no_other_by_more_than_its_repeated_phase(due_at_s):
    undisturbed, none_again = begun_by_b(None, due_at_s)
    assert none_again == 0
    repeated_s, repeats, most_s = SWITCH_S + TRAIN_S + PARK_S, 0, 0.0
    for killed_at_s in range(18, 62, 2):
        disturbed, again = begun_by_b(killed_at_s + 0.5, due_at_s)
        late_s = [after - before for before, after in zip(undisturbed, disturbed, strict=True)]
        # Each of the moments at which the host looks may be one poll later.
        assert max(late_s) <= repeated_s + 2, killed_at_s
        repeats, most_s = repeats + again, max(most_s, *late_s)
    assert repeats >= 5


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
    assert stage.workers.evicted_at_s[A.id] < 50
    assert stage.workers.evicted_at_s[B.id] >= 95, "that of a run that is seated stays"


def test_a_run_that_leaves_while_it_trains_ends_its_phase_first(stage):
    stage.admit(A)
    stage.due(A, 0, at_s=10)
    left = LeftRecord(id=A.id, reason="done", left_at_s=0.0)
    stage.clock.at(14, lambda: records.put(stage.fleet, fleet_layout.left(A.id), left))
    stage.due(A, 1, at_s=40)
    assert stage.play(80) == [("a", 0)]
    assert stage.workers.evicted == [A.id]
    published_s = 10 + SWITCH_S + TRAIN_S + PARK_S + PUBLISH_S
    assert published_s <= stage.workers.evicted_at_s[A.id] <= published_s + 3
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
