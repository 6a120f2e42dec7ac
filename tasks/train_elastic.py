"""The train task on several nodes: the step of the train task, in ranks started by torch's elastic launcher.

The nodes are a PyTorchJob, which needs Kubeflow's training operator in the cluster, and a NetworkPolicy, because the
launcher listens for the other nodes without a password (docs/guide/platform.md). Imported only if several nodes are
configured. Ranks of one node are started by `tasks.learning.launch`.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import TaskPlugins
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask

from resources.ending import ends_on_notice
from resources.pools import pod_template
from storage.records.run import read_plan
from storage.stores.connect import connect
from storage.stores.store import StoreUnavailable
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.references import PlanReference, TrainOutcome
from tasks.train import DEFAULT_POOL, trained

ROOT = Path(__file__).parents[1]


class Gang(Elastic):  # type: ignore[misc]  # the plugin has no types
    """Elastic whose size comes from the run's configuration, which is unknown when the task is declared."""


class GangTask(PytorchElasticFunctionTask):  # type: ignore[misc]
    """An elastic task whose number of nodes and processes is in the configuration of the plan."""

    def __init__(self, task_config: Gang, task_function: Callable[..., Any], **settings: Any) -> None:
        # The plugin's own would import torch, which the image of the task that declares this one does not have.
        super(PytorchElasticFunctionTask, self).__init__(
            task_config=task_config,
            task_type=self._ELASTIC_TASK_TYPE,
            task_function=task_function,
            task_type_version=1,
            **settings,
        )
        self.rdzv_backend = "c10d"
        self.resize(task_config.nnodes, task_config.nproc_per_node)

    def resize(self, nnodes: int, nproc_per_node: int) -> None:
        """Declare, or run, this many processes on this many nodes from now on."""
        # No restarts: a new attempt of the task replays the recorded batches. Processes are spawned, not forked,
        # because threads of the parent (the object store's) and CUDA do not survive a fork.
        self._task_config = gang(nnodes, nproc_per_node)
        self.min_nodes = self.max_nodes = nnodes

    # Without this the launcher would wait for the other nodes despite SIGTERM, and later end with status 0.
    @ends_on_notice()
    def _execute(self, **kwargs: Any) -> Any:
        plan: PlanReference = kwargs["plan"]
        try:
            store = connect(plan.run_url)
            config = config_in_force(store, read_plan(store, plan.iteration)).trainer
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
        self.resize(config.nnodes, config.nproc_per_node)
        # Spawned processes find `tasks` where this process does.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return super()._execute(**kwargs)


TaskPlugins.register_pythontask_plugin(Gang, GangTask)


def gang(nnodes: int, nproc_per_node: int) -> Gang:
    """The settings of torch's elastic launcher."""
    return Gang(nnodes=nnodes, nproc_per_node=nproc_per_node, max_restarts=0, increase_shared_mem=False)


@task(
    task_config=gang(2, 1),
    interruptible=False,
    retries=DEFAULT_POOL.retries,
    pod_template=pod_template(DEFAULT_POOL),
)
def train_elastic(plan: PlanReference) -> TrainOutcome:
    """Run the train task on every rank; the first rank's outcome counts."""
    from tasks.learning.train_iteration import train_iteration  # noqa: PLC0415 - when the task runs

    return trained(plan, train_iteration)


def elastic_trainer(nnodes: int, nproc_per_node: int) -> Any:
    """`train_elastic`, declared for a configuration."""
    train_elastic.resize(nnodes, nproc_per_node)
    return train_elastic
