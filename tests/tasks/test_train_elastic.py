"""The train task on several ranks: what Flyte is told, and what a failure is worth."""

import pytest
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.exceptions.user import FlyteRecoverableException
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from tasks.configuration.references import PlanReference, TrainOutcome
from tasks.train_elastic import elastic_trainer, train_elastic
from tests.small_run import Unreachable, memory_store

SETTINGS = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")


def test_one_node_needs_no_operator():
    task = elastic_trainer(1, 4)
    assert (task.task_type, task.task_config.nproc_per_node, task.task_config.max_restarts) == ("python-task", 4, 0)
    assert not task.get_custom(SETTINGS)


def test_several_nodes_are_a_pytorch_job():
    task = elastic_trainer(3, 8)
    assert task.task_type == "pytorch"
    custom = task.get_custom(SETTINGS)
    assert custom["workerReplicas"]["replicas"] == 3
    elastic = custom["elasticConfig"]
    assert (elastic["minReplicas"], elastic["maxReplicas"], elastic["nprocPerNode"]) == (3, 3, 8)
    assert elastic.get("maxRestarts", 0) == 0


def test_it_is_reserved_has_retries_and_takes_what_train_takes():
    assert train_elastic.metadata.interruptible is False
    assert train_elastic.metadata.retries >= 1
    assert isinstance(train_elastic, PytorchElasticFunctionTask)
    assert train_elastic.python_interface.inputs == {"plan": PlanReference}
    assert list(train_elastic.python_interface.outputs.values()) == [TrainOutcome]


def test_a_store_that_does_not_answer_is_worth_another_attempt():
    memory_store("train-elastic", Unreachable())
    reference = PlanReference(run_url="memory://train-elastic", iteration=0, weight_version=0, execution="e")
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        train_elastic(plan=reference)
