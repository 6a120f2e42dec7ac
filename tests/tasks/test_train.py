"""The train task as Flyte calls it, and how its container ends at a notice."""

import os
import signal

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from resources.notice import EXIT_CODE
from resources.process import descendants
from storage.records import layout
from tasks.configuration.references import PlanReference
from tasks.learning.journal_follower import GroupTimeout
from tasks.train import train
from tests.processes import LIMIT_S, PID_1, are_gone, command, container, first_process, wait_until
from tests.small_run import (
    OWN_REWARD,
    Unreachable,
    config,
    memory_store,
    plan_iteration,
    roll_out,
)

URL = "memory://train-task"


@pytest.mark.slow
def test_the_task_publishes_the_next_version_and_a_second_attempt_says_the_same(model):
    store = memory_store("train-task")
    reference = plan_iteration(config(URL, model, rewards=OWN_REWARD))
    roll_out(URL, 0)
    outcome = train(plan=reference)
    assert outcome.weight_version == reference.weight_version + 1
    assert 0 < outcome.reward < 1
    before = store.list("")
    assert layout.manifest(layout.weights(1)) in before
    assert train(plan=reference) == outcome
    assert store.list("") == before


def test_what_makes_the_step_impossible_comes_through_by_name(model):
    memory_store("train-task")
    reference = plan_iteration(config(URL, model, trainer={"group_timeout_s": 0.05}))
    with pytest.raises(GroupTimeout, match=r"response 0 \(group 0\): 0 tokens, not claimed"):
        train(plan=reference)


def test_the_task_is_reserved_and_has_retries():
    assert train.metadata.interruptible is False
    assert train.metadata.retries >= 1


def test_a_store_that_does_not_answer_is_worth_another_attempt():
    memory_store("train-task", Unreachable())
    reference = PlanReference(run_url=URL, iteration=0, weight_version=0, execution="e")
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        train(plan=reference)


@pytest.mark.slow
def test_told_to_end_it_ends_with_what_it_has_started_and_another_attempt_does_the_step(model, tmp_path):
    url = str(tmp_path / "run")
    reference = plan_iteration(config(url, model, rewards=OWN_REWARD, trainer={"group_timeout_s": 600.0}))
    with container(train, reference, tmp_path / "container") as process:
        wait_until(lambda: any("tasks.grading.worker" in command(each) for each in descendants(process.pid)))
        started = descendants(process.pid)
        os.kill(first_process(process.pid, as_pid_1=bool(PID_1)), signal.SIGTERM)
        assert process.wait(LIMIT_S) == EXIT_CODE
        wait_until(lambda: are_gone(started))
    # Neither outputs nor an error: perhaps the page that it had while it ran.
    assert {path.name for path in tmp_path.glob("container/out/*")} <= {"deck.html"}
    roll_out(url, 0)
    assert train(plan=reference).weight_version == 1
