"""The task of a standing trainer: one machine trains every iteration of an execution, and keeps the trainer's state."""

import os

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.notice import EXIT_CODE
from resources.pools import PoolConfig, pod_template
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import PlanReference
from tasks.reporting.last_failures import TaskSubject
from tasks.task_log import logged_task, place_of

DEFAULT_POOL = PoolConfig()


@task(interruptible=False, retries=DEFAULT_POOL.retries, pod_template=pod_template(DEFAULT_POOL))
def stand_trainer(plan: PlanReference, iterations: int) -> bool:
    """Train each iteration of the execution as its groups are recorded, until the last one's weights are published.

    On SIGTERM the process ends with 137, which Flyte always counts as a loss of the machine: the next attempt restores
    the state, and replays what was recorded.

    Args:
        plan: the execution's first iteration
        iterations: how many the execution has
    """
    from tasks.sharing.standing_trainer import stand  # noqa: PLC0415 - when the task runs

    # It fails at the iteration that the run has come to.
    work = TaskSubject(task="train", run_url=plan.run_url, execution=plan.execution)
    with logged_task(place_of(plan), work, "standing trainer", code=plan.code) as log:
        try:
            is_over = stand(plan, iterations)
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
        if log is not None:
            log.end("ends: the execution needs no trainer any more" if is_over else "ends on notice (SIGTERM)")
        if not is_over:
            os._exit(EXIT_CODE)
    return is_over
