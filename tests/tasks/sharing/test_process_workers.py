"""A host with real worker processes trains runs in turns; kills of workers, collectors and the host change no bit."""

import itertools
import os
import signal
import tempfile
import time
from contextlib import suppress
from functools import partial

import pytest

from resources.local_starter import running_starter
from resources.process import descendants
from storage.clock import SystemClock
from storage.fleet.fleet_records import AdmittedRun
from storage.records import layout
from storage.stores.connect import connect
from tasks.admitting.fleet_admission import expected_state_bytes
from tasks.learning.collecting import PhaseFailed, collect_and_wait
from tasks.sharing.fleet_ledger import tier_accounts
from tasks.sharing.fleet_report import account_for
from tasks.sharing.fleet_view import look_at_fleet
from tasks.sharing.process_workers import ProcessWorkers
from tests.forked import ForkedProcess
from tests.served_fleet import LIMIT_S, a_shared_run, alone, begin, in_thread, make_fleet, serving, spent_by, states
from tests.small_run import EXECUTION, commit_iteration, plan_iteration, roll_out

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(tmp_path):
    return make_fleet(tmp_path)


def kill_workers():
    """SIGKILL every worker process of this machine's starter; returns how many there were."""
    workers = descendants(running_starter(os.environ).pid)
    for each in workers:
        # What a worker had started may have ended with it.
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return len(workers)


def assert_learned(settings, expected, killed_at):
    """The run has the expected states; a worker killed after its publication in `killed_at` leaves no checkpoint."""
    found = states(settings.run.url)
    unsaved = expected.keys() - found.keys()
    assert unsaved <= {layout.checkpoint(killed_at + 1)}
    assert found == {key: state for key, state in expected.items() if key not in unsaved}


OTHER = {"algorithm": {"kl_coef": 0.1}}


def test_two_runs_on_one_host_learn_what_each_learns_alone_though_workers_and_the_host_are_killed(
    tmp_path, fleet, model
):
    a, b = a_shared_run(tmp_path, fleet, model, "a"), a_shared_run(tmp_path, fleet, model, "b", **OTHER)
    iterations = 4
    warm = []

    def go_through(iteration, kills=False):
        waiting = [begin(each, iteration) for each in (a, b)]
        if kills:
            # A worker that is killed here has parked, trains, or publishes.
            assert kill_workers() >= 2
            time.sleep(0.05)
            kill_workers()
        warm.append([wait().metrics["sharing/warm"] for wait in waiting])
        for each in (a, b):
            commit_iteration(each.run.url, iteration)

    with serving(fleet, "first"):
        go_through(0)
        go_through(1)
        go_through(2, kills=True)
    # The first host is gone with its workers; the second takes its seats.
    with serving(fleet, "second"):
        go_through(3)
    assert warm[1] == [1.0, 1.0]
    assert_learned(a, alone(model, iterations), killed_at=2)
    assert_learned(b, alone(model, iterations, **OTHER), killed_at=2)
    spent = [entry for record in spent_by(fleet, "first") for entry in record.entries]
    assert {entry.kind for entry in spent} >= {"switch", "train", "idle"}
    assert spent[0].began_s == 0
    assert all(left.ended_s == right.began_s for left, right in itertools.pairwise(spent))
    view = look_at_fleet(fleet)
    assert [(run.host, run.left) for run in view.runs] == [("second", False)] * 2
    assert {each.incarnation: each.state for each in view.hosts} == {"first": "gone", "second": "gone"}


COLLECTOR = """
import sys
from storage.clock import SystemClock
from tasks.learning.collecting import collect_and_wait
collect_and_wait(sys.argv[1], int(sys.argv[2]), sys.argv[3], SystemClock())
"""


def begin_and_kill_the_collector(folder, settings, iteration):
    """As `begin`, but the first attempt is a process that is killed as soon as it has recorded a micro-batch."""
    plan_iteration(settings, SystemClock())
    roll_out(settings.run.url, iteration)
    store = connect(settings.run.url)
    (folder / "collector.py").write_text(COLLECTOR)
    collector = ForkedProcess([str(folder / "collector.py"), settings.run.url, str(iteration), EXECUTION], (1,))
    with collector.streams[1]:
        while not list(store.list(layout.batches(iteration))):
            assert collector.poll() is None, "it ended before it had recorded anything"
            time.sleep(0.005)
        collector.kill()
        assert collector.wait() == -signal.SIGKILL
    return in_thread(collect_and_wait, settings.run.url, iteration, EXECUTION, SystemClock())


def test_three_runs_learn_what_each_learns_alone_though_a_collector_a_worker_and_the_host_are_killed(
    tmp_path, fleet, model
):
    runs = {name: a_shared_run(tmp_path, fleet, model, name) for name in ("a", "b", "c")}

    def go_through(iteration, victim=None):
        begins = {name: partial(begin_and_kill_the_collector, tmp_path) if name == victim else begin for name in runs}
        waiting = [begins[name](runs[name], iteration) for name in runs]
        if iteration == 1:
            assert kill_workers() >= 3
        for wait in waiting:
            wait()
        for each in runs.values():
            commit_iteration(each.run.url, iteration)

    with serving(fleet, "first"):
        go_through(0, victim="a")
        go_through(1, victim="c")
    with serving(fleet, "second"):
        go_through(2, victim="b")
    for each in runs.values():
        assert_learned(each, alone(model, 3), killed_at=1)


def test_states_that_memory_does_not_hold_at_once_come_from_the_object_store_with_the_same_bits(tmp_path, fleet, model):
    runs = {name: a_shared_run(tmp_path, fleet, model, name) for name in ("a", "b")}
    one_bytes = expected_state_bytes(runs["a"], model)
    with serving(fleet, "host", memory_bytes=one_bytes):
        for iteration in range(3):
            for waits in [begin(each, iteration) for each in runs.values()]:
                waits()
            for each in runs.values():
                commit_iteration(each.run.url, iteration)
    restored = [each for record in spent_by(fleet, "host") for each in record.restored]
    # The first phase of an iteration finds its state in memory if its run was the last before.
    assert sum(each.tier == "object store" for each in restored) >= 4
    assert all(each.num_bytes > 0 and each.seconds > 0 for each in restored)
    [account] = account_for(fleet).hosts
    assert sum(each.phases for each in tier_accounts(account.restored)) == 6
    for each in runs.values():
        assert states(each.run.url) == alone(model, 3)


def test_a_phase_in_which_every_attempt_would_fail_ends_the_run_by_name_and_no_other(tmp_path, fleet, model):
    a, b = a_shared_run(tmp_path, fleet, model, "a"), a_shared_run(tmp_path, fleet, model, "b")
    with serving(fleet, "host"):
        for each in (a, b):
            begin(each, 0)()
            commit_iteration(each.run.url, 0)
        checkpoint = connect(a.run.url)
        plan_iteration(a, SystemClock())
        key = next(key for key in checkpoint.list(layout.checkpoint(1)) if key.endswith(".safetensors"))
        kill_workers()
        body = bytearray(checkpoint.get(key))
        body[-1] ^= 1
        checkpoint.put(key, bytes(body))
        roll_out(a.run.url, 1)
        damaged = in_thread(collect_and_wait, a.run.url, 1, EXECUTION, SystemClock())
        with pytest.raises(PhaseFailed, match=rf"^iteration 1 could not be trained: CorruptObject: object '{key}'"):
            damaged()
        begin(b, 1)()
        body[-1] ^= 1
        checkpoint.put(key, bytes(body))
        # The next execution tries again.
        with pytest.raises(PhaseFailed):
            collect_and_wait(a.run.url, 1, EXECUTION, SystemClock())


@pytest.mark.parametrize("length", [0, 78, 200])
def test_a_run_that_does_not_exist_fails_and_is_told_however_long_tmpdir_is(tmp_path, monkeypatch, length):
    place = tmp_path / ("x" * max(1, length - len(str(tmp_path)) - 1))
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place) if length else None)
    run = AdmittedRun(
        id="0" * 16, run_url=str(tmp_path / "no"), phase_s=1.0, cycle_s=9.0, state_bytes=0, admitted_at_s=0.0
    )
    with ProcessWorkers() as workers:
        assert workers.state(run.id).phase == "absent"
        workers.begin(run, 0)
        until = time.monotonic() + LIMIT_S
        while workers.state(run.id).phase != "failed":
            assert workers.state(run.id).has_device
            assert time.monotonic() < until
            time.sleep(0.02)
        assert "holds no run" in workers.state(run.id).message
        workers.begin(run, 0)
        assert workers.state(run.id).phase == "restoring"
        workers.kill(run.id)
        assert workers.state(run.id).phase == "absent"
