"""Which ports each kind of process opens: none, or ports of the loopback that what they serve knows a secret for.

What ranks and pages ask of those who connect is tested where they are. Two ranks of a train task are in
`tests/tasks/test_train_ranks.py`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resources.process import descendants
from storage.records import layout
from storage.stores.connect import connect
from tasks.rollout import rollout
from tasks.train import train
from tests.committed_runs import begin as begin_run
from tests.open_ports import Listener, listeners
from tests.processes import LIMIT_S, ROOT, command, container, wait_until
from tests.served_fleet import a_shared_run, begin, make_fleet
from tests.served_run import SECTIONS as SERVED
from tests.small_run import OWN_REWARD, config, document, model_directory, plan_iteration

pytestmark = pytest.mark.slow

SLOW_ENGINE = {"engine": "torch", "device": "cpu", "max_responses_in_flight": 2, "flush_interval_s": 0.1}


def planned(folder: Path, **sections):
    rollout_of = {"rollout": SLOW_ENGINE, "sampling": {"max_completion_length": 90}}
    settings = config(str(folder / "run"), model_directory(folder / "model"), **(rollout_of | sections))
    return plan_iteration(settings)


@contextmanager
def gleaner(*arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
    """`gleaner` with these arguments, killed at the end."""
    process = subprocess.Popen([sys.executable, "-m", "gleaner", *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def found_until(process: "subprocess.Popen[bytes]", is_enough: Callable[[], bool]) -> set[Listener]:
    """All ports at which the process and its descendants have listened, until it has ended or it is enough."""
    found: set[Listener] = set()
    until_s = time.monotonic() + LIMIT_S
    while process.poll() is None and not is_enough():
        found |= set(listeners([process.pid, *descendants(process.pid)]))
        assert time.monotonic() < until_s
        time.sleep(0.05)
    return found


def journalled(url: str) -> bool:
    return any("/journal/" in key for key in connect(url).list(""))


def test_a_slot_opens_none(tmp_path):
    plan = planned(tmp_path)
    with container(rollout, plan, tmp_path / "container", slot=0) as process:
        assert found_until(process, lambda: False) == set()
        assert process.returncode == 0
    assert journalled(plan.run_url)


def test_a_member_that_joins_opens_none(tmp_path):
    plan = planned(tmp_path)
    with gleaner("join", plan.run_url) as process:
        assert found_until(process, lambda: journalled(plan.run_url)) == set()
        assert process.returncode is None


def test_a_trainer_of_one_rank_opens_none(tmp_path):
    plan = planned(tmp_path, rewards=OWN_REWARD, trainer={"group_timeout_s": 600.0})
    with container(train, plan, tmp_path / "container") as process:
        grades = lambda: any("tasks.grading.worker" in command(each) for each in descendants(process.pid))  # noqa: E731
        assert found_until(process, grades) == set()
        assert grades()
        assert listeners([process.pid, *descendants(process.pid)]) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_host_opens_none_and_the_ranks_of_its_workers_listen_on_the_loopback(tmp_path, model, ranks):
    fleet = make_fleet(tmp_path)
    run = a_shared_run(tmp_path, fleet, model, "a", ranks=ranks)
    command_line = ("fleet", "host", fleet, "--memory-gib", "1", "--devices", str(ranks), "--poll-interval-s", "0.02")
    with gleaner(*command_line) as process:
        waits = begin(run, 0)
        published = layout.manifest(layout.weights(1))
        found = found_until(process, lambda: published in connect(run.run.url).list(published))
        waits()
        assert all(each.process != process.pid and each.on_loopback for each in found)
        assert bool(found) == (ranks > 1)


@pytest.mark.parametrize("arguments", [("watch", "--serve", "0", "--interval-s", "0.1"), ("view",)])
def test_what_shows_a_run_listens_on_the_loopback(tmp_path, arguments):
    url = str(tmp_path / "run")
    begin_run(connect(url))
    with gleaner(arguments[0], url, *arguments[1:]) as process:
        opened = lambda: listeners([process.pid])  # noqa: E731
        wait_until(lambda: bool(opened()))
        [listener] = opened()
        assert listener.on_loopback


def test_a_served_run_listens_on_the_loopback_and_not_without_a_key(tmp_path, model, monkeypatch):
    file = tmp_path / "served.json"
    file.write_text(json.dumps(document(str(tmp_path / "run"), model, **SERVED)))
    monkeypatch.setenv("GLEANER_SERVE_KEY", "short")
    with gleaner("serve", str(file), "--listen", "0") as process:
        assert found_until(process, lambda: False) == set()
        assert process.returncode == 1
    monkeypatch.setenv("GLEANER_SERVE_KEY", "a-key-of-enough-characters")
    with gleaner("serve", str(file), "--listen", "0") as process:
        opened = lambda: listeners([process.pid])  # noqa: E731
        wait_until(lambda: bool(opened()))
        [listener] = opened()
        assert listener.on_loopback


def test_a_port_that_others_can_reach_is_found(tmp_path):
    program = "import socket, sys; s = socket.create_server(('0.0.0.0', 0)); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        [listener] = listeners([process.pid])
        assert not listener.on_loopback
        process.stdin.close()
    wait_until(lambda: process.poll() is not None)
