"""The train task on several ranks of one machine: who can reach them, what a failure is worth, and how they end."""

import os
import re
import signal
import threading
from contextlib import contextmanager

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from resources.local_starter import running_starter
from resources.notice import EXIT_CODE
from resources.process import descendants
from storage.records import layout
from storage.stores.connect import connect
from tasks.learning.rank_ends import RanksFailed
from tasks.train import train
from tests.open_ports import answers_at, listeners, own_address
from tests.processes import LIMIT_S, PID_1, are_gone, command, container, first_process, wait_until
from tests.small_run import OWN_REWARD, config, model_directory, plan_iteration, roll_out

pytestmark = pytest.mark.slow


def planned(folder, **trainer):
    """A plan without a crew, so that the trainer waits."""
    settings = config(
        str(folder / "run"),
        model_directory(folder / "model"),
        rewards=OWN_REWARD,
        trainer={"group_timeout_s": 600.0, "nproc_per_node": 2, **trainer},
    )
    return plan_iteration(settings)


@contextmanager
def waiting_ranks(folder, **variables):
    """A container whose ranks wait for the journal."""
    with container(train, planned(folder), folder / "container", **variables) as process:
        wait_until(lambda: any("tasks.grading.worker" in command(each) for each in descendants(process.pid)))
        yield process


def children_of(process):
    """The living processes that a process has forked itself."""
    found = descendants(process)
    return [each for each in found if not any(each in descendants(other) for other in found if other != each)]


def ranks_of(container):
    """The ranks below a container: what its starter has forked."""
    [starter] = [each for each in descendants(container.pid) if "local_starter" in command(each)][:1]
    return children_of(starter)


@pytest.mark.parametrize("variables", [{}, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}])
def test_no_other_machine_can_reach_a_port_of_the_ranks(tmp_path, variables):
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but those of the loopback")
    with waiting_ranks(tmp_path, **variables) as process:
        assert len(ranks_of(process)) == 2
        found = listeners([process.pid, *descendants(process.pid)])
        assert found, "gloo listens somewhere"
        assert [each for each in found if answers_at(address, each.port)] == []
        assert [each for each in found if not each.on_loopback] == []


def test_two_ranks_publish_what_they_have_trained_and_end(tmp_path):
    plan = planned(tmp_path)
    roll_out(plan.run_url, 0)
    with container(train, plan, tmp_path / "container") as process:
        assert process.wait(LIMIT_S) == 0, (tmp_path / "container" / "log").read_text()
    assert layout.manifest(layout.weights(1)) in connect(plan.run_url).list("")
    assert (tmp_path / "container" / "out" / "outputs.pb").exists()


def test_told_to_end_its_ranks_end_too_even_one_that_hears_nothing(tmp_path):
    with waiting_ranks(tmp_path) as process:
        os.kill(ranks_of(process)[1], signal.SIGSTOP)
        started = descendants(process.pid)
        os.kill(first_process(process.pid, as_pid_1=bool(PID_1)), signal.SIGTERM)
        assert process.wait(LIMIT_S) == EXIT_CODE
        wait_until(lambda: are_gone(started))
    # Nothing that Flyte would take for an end of its own.
    assert {path.name for path in tmp_path.glob("container/out/*")} <= {"deck.html"}


def test_ranks_end_with_the_process_that_has_started_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.processes.PID_1", [])
    with waiting_ranks(tmp_path) as process:
        started = descendants(process.pid)
        assert len(started) >= 4
        process.kill()
        wait_until(lambda: are_gone(started))


def test_what_every_attempt_would_fail_with_ends_the_task_with_one_line_that_names_the_rank(tmp_path):
    plan = planned(tmp_path, group_timeout_s=0.05)
    with pytest.raises(RanksFailed) as caught:
        train(plan=plan)
    # flytekit writes a line before it.
    [_, line] = str(caught.value).splitlines()
    assert re.search(r"^ *rank 0 of 2: GroupTimeout: .*response 0 \(group 0\): 0 tokens", line)
    assert not isinstance(caught.value, FlyteRecoverableException)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_lost_ends_the_others_and_is_worth_another_attempt(tmp_path, victim):
    plan, starter = planned(tmp_path), running_starter(os.environ).pid
    others, ranks = set(descendants(starter)), []

    def kill():
        wait_until(lambda: any("tasks.grading.worker" in command(each) for each in descendants(starter)))
        ranks.extend(each for each in children_of(starter) if each not in others)
        os.kill(ranks[victim], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(FlyteRecoverableException, match=f"its rank {victim} ended with -9"):
        train(plan=plan)
    killer.join()
    assert len(ranks) == 2
    wait_until(lambda: are_gone(ranks))
