"""A host with real worker processes trains two runs in turns; kills of workers and of the host change no bit."""

import itertools
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from resources.local_starter import running_starter
from resources.process import descendants
from storage import fleet_layout, layout, records
from storage.clock import SystemClock
from storage.connect import connect
from storage.fleet_records import AdmittedRun, HostRecord, SpentRecord
from storage.weights import tensor_sets
from tasks.learning.collecting import PhaseFailed, collect_and_wait
from tasks.sharing.fleet_admission import Profile, admit
from tasks.sharing.fleet_view import look_at_fleet
from tasks.sharing.host import Host, HostSettings
from tasks.sharing.membership import create_fleet, open_fleet
from tasks.sharing.process_workers import ProcessWorkers
from tests.small_run import EXECUTION, commit_iteration, config, plan_iteration, roll_out, train_iteration

pytestmark = pytest.mark.slow
LIMIT_S = 600
SETTINGS = HostSettings(poll_interval_s=0.02, look_interval_s=0.1, spent_interval_s=0.2)
KEPT = {"retention": {"keep_weights": 9, "keep_checkpoints": 9}}


def in_thread(work, *arguments):
    """Start a thread; returns a function that waits for it and returns its result, or raises its error."""
    outcome = []

    def run():
        try:
            outcome.append((work(*arguments), None))
        except Exception as error:  # noqa: BLE001 - raised again below
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(LIMIT_S)
        [(value, error)] = outcome
        if error is not None:
            raise error
        return value

    return result


@pytest.fixture
def fleet(tmp_path):
    url = str(tmp_path / "fleet")
    create_fleet(url, [str(tmp_path / "runs")], 5.0, 1.1, SystemClock())
    return url


@contextmanager
def serving(fleet, name):
    """A host in a thread, until the end of the block."""
    store, rules = open_fleet(fleet)
    me = HostRecord(incarnation=name, machine="here", memory_bytes=1 << 30, usd_per_hour=1.0, began_at_s=0.0)
    told = threading.Event()
    with ProcessWorkers() as workers:
        host = Host(store, rules, me, SETTINGS, workers, SystemClock(), is_told_to_end=told.is_set)
        ended = in_thread(host.run)
        try:
            yield workers
        finally:
            told.set()
            ended()


def a_run(tmp_path, fleet, model, name, **sections):
    url = str(tmp_path / "runs" / name)
    trainer = {"placement": "shared", "fleet": fleet, "group_timeout_s": LIMIT_S}
    settings = config(url, model, trainer=trainer, **{**KEPT, **sections})
    admit(settings, model, Profile(phase_s=1.0, cycle_s=10.0), SystemClock())
    return settings


def alone(tmp_path, model, name, iterations, **sections):
    """The states of the same run with a trainer of its own."""
    url = str(tmp_path / "alone" / name)
    settings = config(url, model, **{**KEPT, **sections})
    for iteration in range(iterations):
        plan_iteration(settings)
        roll_out(url, iteration)
        train_iteration(url, iteration)
        commit_iteration(url, iteration)
    return states(url)


def states(url):
    store = connect(url)
    prefixes = [key.removesuffix("manifest.json") for key in store.list("") if key.endswith("/manifest.json")]
    return {prefix: tensor_sets.read_manifest(store, prefix).tensors for prefix in prefixes}


def begin(settings, iteration):
    """Roll an iteration out, and begin its train task."""
    plan_iteration(settings, SystemClock())
    roll_out(settings.run.url, iteration)
    return in_thread(collect_and_wait, settings.run.url, iteration, EXECUTION, SystemClock())


def kill_workers():
    """SIGKILL every worker process of this machine's starter; returns how many there were."""
    workers = descendants(running_starter(os.environ).pid)
    for each in workers:
        os.kill(each, signal.SIGKILL)
    return len(workers)


def entries(fleet, host):
    store = connect(fleet)
    found = [records.read(store, SpentRecord, key) for key in store.list(fleet_layout.spent_by(host))]
    return [entry for record in found for entry in record.entries]


OTHER = {"algorithm": {"kl_coef": 0.1}}


def test_two_runs_on_one_host_learn_what_each_learns_alone_though_workers_and_the_host_are_killed(
    tmp_path, fleet, model
):
    a, b = a_run(tmp_path, fleet, model, "a"), a_run(tmp_path, fleet, model, "b", **OTHER)
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
    assert warm[:2] == [[0.0, 0.0], [1.0, 1.0]]
    assert warm[3] == [0.0, 0.0]
    assert states(a.run.url) == alone(tmp_path, model, "a", iterations)
    assert states(b.run.url) == alone(tmp_path, model, "b", iterations, **OTHER)
    spent = entries(fleet, "first")
    assert {entry.kind for entry in spent} >= {"switch", "train", "idle"}
    assert spent[0].began_s == 0
    assert all(left.ended_s == right.began_s for left, right in itertools.pairwise(spent))
    view = look_at_fleet(fleet)
    assert [(run.host, run.left) for run in view.runs] == [("second", False)] * 2
    assert {each.incarnation: each.state for each in view.hosts} == {"first": "gone", "second": "gone"}


def test_a_phase_in_which_every_attempt_would_fail_ends_the_run_by_name_and_no_other(tmp_path, fleet, model):
    a, b = a_run(tmp_path, fleet, model, "a"), a_run(tmp_path, fleet, model, "b")
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


def test_a_run_that_does_not_exist_fails_and_is_told(tmp_path):
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
