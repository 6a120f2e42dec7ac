"""Runs of two ranks on one host learn what they learn with two ranks of their own, whatever is killed."""

import itertools
import json
import os
import resource
import signal
import sys
import time
from functools import cache
from pathlib import Path
from subprocess import Popen

import pytest

from resources.local_starter import running_starter
from resources.process import descendants
from storage.clock import SystemClock
from storage.fleet.fleet_layout import run_id
from storage.fleet.fleet_reading import read_run
from storage.records import layout
from storage.stores.connect import connect
from tasks.admitting.fleet_admission import expected_state_bytes
from tasks.learning.collecting import PhaseFailed, collect_and_wait
from tasks.sharing.process_workers import ProcessWorkers
from tests.processes import ROOT
from tests.served_fleet import KEPT, LIMIT_S, a_shared_run, begin, in_thread, make_fleet, serving, spent_by, states
from tests.small_run import EXECUTION, commit_iteration, config, plan_iteration, roll_out
from tests.tasks.learning.launched_ranks import rank_server

pytestmark = pytest.mark.slow

PPO = {"algorithm": {"advantage_estimator": "gae", "kl_coef": 0.1}}
ADAPTER = {"lora": {"rank": 2}, "trainer": {"checkpoint_interval": 2}}


@pytest.fixture
def fleet(tmp_path):
    return make_fleet(tmp_path)


@pytest.fixture(scope="module")
def ranks_server():
    """Where ranks are forked without a host."""
    with rank_server() as server:
        yield server


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model, ranks_server):
    """alone(iterations, **sections) -> the states of a run with two ranks of its own, forked anew each time."""

    @cache
    def learned(iterations, sections):
        url = tmp_path_factory.mktemp("alone") / "run"
        chosen = json.loads(sections)
        trainer = {"nproc_per_node": 2} | chosen.pop("trainer", {})
        settings = config(str(url), model, **{**KEPT, "trainer": trainer, **chosen})
        for iteration in range(iterations):
            plan_iteration(settings)
            roll_out(str(url), iteration)
            ranks_server.launch(f"train_iteration {iteration}", url, 2)
            commit_iteration(str(url), iteration)
        return states(str(url))

    return lambda iterations, **sections: learned(iterations, json.dumps(sections))


@pytest.fixture
def started_here():
    """started_here() -> the living processes that this one has had started since the test began."""
    starter = running_starter(os.environ).pid
    others = set(descendants(starter))
    return lambda: [process for process in descendants(starter) if process not in others]


def go_through(runs, iteration):
    """One iteration of each run; the records of their training."""
    found = [wait() for wait in [begin(each, iteration) for each in runs]]
    for each in runs:
        commit_iteration(each.run.url, iteration)
    return found


def damaged(body):
    return body[:-1] + bytes([body[-1] ^ 1])


def until(is_so, what):
    until_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < until_s, what
        time.sleep(0.002)


def test_two_runs_of_two_ranks_learn_what_each_learns_alone(tmp_path, fleet, model, alone):
    """One with a reference and a critic, and one with adapters, whose state is stored only now and then."""
    a, b = (a_shared_run(tmp_path, fleet, model, name, ranks=2, **more) for name, more in (("a", PPO), ("b", ADAPTER)))
    with serving(fleet, "host", devices=2):
        warm = [[record.metrics["sharing/warm"] for record in go_through([a, b], n)] for n in range(3)]
    assert warm[1:] == [[1.0, 1.0], [1.0, 1.0]]
    assert states(a.run.url) == alone(3, **PPO)
    assert states(b.run.url) == alone(3, **ADAPTER)
    # A second of both devices is one second of the host.
    entries = [entry for record in spent_by(fleet, "host") for entry in record.entries]
    assert all(left.ended_s == right.began_s for left, right in itertools.pairwise(entries))


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_rank_that_is_killed_ends_the_others_of_its_run_and_no_other_process(
    tmp_path, fleet, model, alone, started_here, victim
):
    a, b = (a_shared_run(tmp_path, fleet, model, name, ranks=2) for name in ("a", "b"))
    with serving(fleet, "host", devices=2) as workers:
        go_through([b], 0)
        of_b = started_here()
        assert len(of_b) == 2
        go_through([a], 0)
        for iteration, phase in enumerate(("training", "publishing", "parked"), start=1):
            waiting = [begin(each, iteration) for each in (b, a)]
            until(lambda wanted=phase: workers.state(run_id(a.run.url)).phase == wanted, "a is never there")
            of_a = [process for process in started_here() if process not in of_b]
            assert len(of_a) == 2
            os.kill(of_a[victim], signal.SIGKILL)
            until(lambda ended=of_a: not set(ended) & set(started_here()), "the other rank lives on")
            for wait in waiting:
                wait()
            for each in (a, b):
                commit_iteration(each.run.url, iteration)
            assert set(of_b) <= set(started_here())
    assert started_here() == []
    assert states(a.run.url) == states(b.run.url) == alone(4)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_has_failed_when_none_of_its_ranks_is_left(tmp_path, fleet, model, started_here, victim):
    a = a_shared_run(tmp_path, fleet, model, "a", ranks=2)
    plan_iteration(a)
    run = read_run(connect(fleet), run_id(a.run.url))
    with ProcessWorkers() as workers:
        workers.begin(run, 0)
        # No group is recorded, so the first rank waits for the journal, and the other for the first.
        until(lambda: workers.state(run.id).phase == "waiting", "it does not begin")
        ranks = started_here()
        assert len(ranks) == 2
        os.kill(ranks[victim], signal.SIGKILL)
        until(lambda: workers.state(run.id).phase == "failed", "it does not fail")
        assert started_here() == []
        assert (workers.state(run.id).message, workers.state(run.id).lasting) == (
            f"its rank {victim} ended with -9",
            False,
        )
        workers.begin(run, 0)
        until(lambda: workers.state(run.id).phase == "waiting", "it does not begin again")
        frozen = started_here()
        os.kill(frozen[victim], signal.SIGSTOP)
        workers.kill(run.id)
        assert (len(frozen), started_here()) == (2, [])


def test_a_worker_whose_second_rank_cannot_be_started_leaves_no_first(tmp_path, fleet, model, started_here):
    a = a_shared_run(tmp_path, fleet, model, "a", ranks=2)
    run = read_run(connect(fleet), run_id(a.run.url))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    with ProcessWorkers() as workers:
        # One more file may be open: the socket of the first rank.
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                workers.begin(run, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        # The starter works in order: what it was told before this has been started.
        (tmp_path / "nothing.py").write_text("")
        assert running_starter(os.environ).start([str(tmp_path / "nothing.py")], os.environ).wait(LIMIT_S) == 0
        assert started_here() == []
        assert workers.state(run.id).phase == "absent"


def test_a_phase_that_is_concluded_while_ranks_wait_for_its_groups_is_no_failure_that_lasts(
    tmp_path, fleet, model, started_here
):
    """As when another host has trained it; the first rank sees that, and the other only that the first is gone."""
    a = a_shared_run(tmp_path, fleet, model, "a", ranks=2)
    plan_iteration(a)
    run = read_run(connect(fleet), run_id(a.run.url))
    with ProcessWorkers() as workers:
        workers.begin(run, 0)
        until(lambda: workers.state(run.id).phase == "waiting", "it does not begin")
        connect(a.run.url).put(layout.report(0), b"concluded")
        until(lambda: workers.state(run.id).phase == "failed", "it goes on")
        assert workers.state(run.id).message == "NoLongerDue: iteration 0 is concluded"
        assert not workers.state(run.id).lasting
        assert started_here() == []


def test_states_of_ranks_that_memory_does_not_hold_at_once_come_from_the_object_store(tmp_path, fleet, model, alone):
    a, b = (a_shared_run(tmp_path, fleet, model, name, ranks=2) for name in ("a", "b"))
    with serving(fleet, "host", memory_bytes=expected_state_bytes(a, model), devices=2):
        for iteration in range(3):
            go_through([a, b], iteration)
    restored = [each for record in spent_by(fleet, "host") for each in record.restored]
    # Of six phases only one may find its state in memory: the first of an iteration, if its run was the last before.
    assert sum(each.tier == "object store" for each in restored) >= 4
    assert states(a.run.url) == states(b.run.url) == alone(3)


def test_a_host_that_is_killed_leaves_no_rank_and_the_next_goes_on(tmp_path, fleet, model, alone):
    a = a_shared_run(tmp_path, fleet, model, "a", ranks=2)
    command = [sys.executable, "-m", "gleaner", "fleet", "host", fleet, "--memory-gib", "1", "--devices", "2"]
    with Popen([*command, "--poll-interval-s", "0.02"], cwd=ROOT) as host:
        go_through([a], 0)
        processes = descendants(host.pid)
        # The starter and two ranks.
        assert len(processes) == 3
        waiting = begin(a, 1)
        until(lambda: connect(a.run.url).list(layout.due(1)), "no phase is due")
        host.kill()
        until(lambda: not [each for each in processes if is_alive(each)], "what it had started lives on")
    with serving(fleet, "second", devices=2):
        waiting()
        commit_iteration(a.run.url, 1)
    assert states(a.run.url) == alone(2)


def is_alive(process):
    """Whether a process runs that may be a child of another than this one."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_what_every_attempt_of_the_ranks_would_end_with_ends_the_run_by_its_name(tmp_path, fleet, model):
    a = a_shared_run(tmp_path, fleet, model, "a", ranks=2)
    with serving(fleet, "host", devices=2) as workers:
        go_through([a], 0)
        plan_iteration(a, SystemClock())
        store = connect(a.run.url)
        # The weights go out first; a checkpoint cut by the kill is replayed from the one before, and none is read.
        until(lambda: store.list(layout.manifest(layout.checkpoint(1))), "checkpoint 1 is never complete")
        key = next(key for key in store.list(layout.checkpoint(1)) if key.endswith(".safetensors"))
        workers.kill(run_id(a.run.url))
        store.put(key, damaged(store.get(key)))
        roll_out(a.run.url, 1)
        waits = in_thread(collect_and_wait, a.run.url, 1, EXECUTION, SystemClock())
        with pytest.raises(PhaseFailed, match=rf"iteration 1 could not be trained: .*CorruptObject: object '{key}'"):
            waits()


@pytest.mark.parametrize("lost_by", [pytest.param(None, marks=pytest.mark.exhaustive), 0, 1])
def test_a_state_that_one_rank_has_lost_is_used_by_none(tmp_path, fleet, model, ranks_server, alone, lost_by):
    a = a_shared_run(tmp_path, fleet, model, "a", ranks=2)
    waits = begin(a, 0)
    told = ranks_server.launch(f"phase {lost_by}", Path(a.run.url), 2)
    assert waits().metrics["sharing/warm"] == float(lost_by is None)
    ahead, on_device = ["prefetching", "parked", "restoring"], ["parking", "publishing", "parked"]
    assert all((phases[:3], phases[-3:]) == (ahead, on_device) for phases in told)
    commit_iteration(a.run.url, 0)
    assert states(a.run.url) == alone(1)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_state_that_one_rank_could_not_read_ahead_is_read_by_all_for_the_phase(
    tmp_path, fleet, model, ranks_server, alone, victim
):
    a = a_shared_run(tmp_path, fleet, model, "a", ranks=2)
    waits = begin(a, 0)
    ranks_server.launch(f"unread {victim}", Path(a.run.url), 2)
    assert waits().metrics["sharing/warm"] == 0.0
    commit_iteration(a.run.url, 0)
    assert states(a.run.url) == alone(1)
