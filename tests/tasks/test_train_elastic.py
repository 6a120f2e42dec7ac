"""The train task on several nodes: what Flyte is told, what a failure is worth, and how it ends at a notice."""

import os
import signal
import socket

import pytest
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.exceptions.user import FlyteRecoverableException
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from resources.notice import EXIT_CODE
from resources.process import descendants
from tasks.configuration.references import PlanReference, TrainOutcome
from tasks.train_elastic import elastic_trainer, train_elastic
from tests.processes import LIMIT_S, PID_1, are_gone, container, first_process, wait_until
from tests.small_run import OWN_REWARD, Unreachable, config, memory_store, model_directory, plan_iteration

SETTINGS = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")


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


def planned(folder, **trainer):
    """A plan without a crew, so that the trainer waits."""
    settings = config(
        str(folder / "run"),
        model_directory(folder / "model"),
        rewards=OWN_REWARD,
        trainer={"group_timeout_s": 600.0, **trainer},
    )
    return plan_iteration(settings)


def answers(port):
    with socket.socket() as peer:
        return peer.connect_ex(("127.0.0.1", port)) == 0


def end(process):
    """Tell a container to end, and see that it does, with all it has started."""
    started = descendants(process.pid)
    os.kill(first_process(process.pid, as_pid_1=bool(PID_1)), signal.SIGTERM)
    assert process.wait(LIMIT_S) == EXIT_CODE
    wait_until(lambda: are_gone(started))


@pytest.mark.slow
def test_told_to_end_while_it_waits_for_another_node_it_ends(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    plan = planned(tmp_path, nnodes=2)
    ends = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": f"localhost:{port}"}
    with container(train_elastic, plan, tmp_path / "container", **ends) as process:
        wait_until(lambda: answers(port) or process.poll() is not None)
        end(process)
