"""The collect task: records an iteration's groups on a machine of pools.control until the train phase is due."""

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.ending import ends_on_notice
from resources.pools import ControlPoolConfig, task_settings
from storage.clock import SystemClock
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import PlanReference
from tasks.task_log import logged_task, place_of, work_on

DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL))
def collect(plan: PlanReference) -> PlanReference:
    """Follow the rollout, grade finished groups and record them; returns `plan` when the train phase is due."""
    return collected(plan)


@ends_on_notice()
def collected(plan: PlanReference) -> PlanReference:
    """The body of the task; raises FlyteRecoverableException if another attempt may help, and ends at SIGTERM."""
    from tasks.learning.collecting import collect as record_groups  # noqa: PLC0415 - when the task runs

    with logged_task(place_of(plan), work_on(plan, "collect"), code=plan.code):
        try:
            record_groups(plan.run_url, plan.iteration, plan.execution, SystemClock())
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
    return plan
