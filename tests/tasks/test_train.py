"""The train task as Flyte calls it."""

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from storage import layout
from tasks.configuration.references import PlanReference
from tasks.learning.follow import GroupTimeout
from tasks.train import train
from tests.small_run import (
    Unreachable,
    config,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
)

URL = "memory://train-task"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


def test_the_task_publishes_the_next_version_and_a_second_attempt_says_the_same(model):
    store = memory_store("train-task")
    reference = plan_iteration(config(URL, model))
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
    with pytest.raises(GroupTimeout, match=r"response 0 \(group 0\): 0 tokens, claimed by nobody"):
        train(plan=reference)


def test_the_task_is_reserved_and_has_retries():
    assert train.metadata.interruptible is False
    assert train.metadata.retries >= 1


def test_a_store_that_does_not_answer_is_worth_another_attempt():
    memory_store("train-task", Unreachable())
    reference = PlanReference(run_url=URL, iteration=0, weight_version=0, execution="e")
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        train(plan=reference)
