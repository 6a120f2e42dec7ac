"""The task behind a rollout map: notes that the map has ended, so that the trainer does not wait for its slots."""

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import ControlPoolConfig, task_settings
from storage.connect import connect
from storage.crew_records import note_rollout_ended
from storage.store import StoreUnavailable
from tasks.configuration.references import PlanReference

DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL))
def rollout_ended(plan: PlanReference, pool: str, slots: list[int]) -> bool:
    """Write that none of `slots`, the plan's on `pool`, will be started again; returns whether there were any."""
    try:
        if slots:
            note_rollout_ended(connect(plan.run_url), plan.iteration, plan.execution, pool, slots)
    except StoreUnavailable as error:
        raise FlyteRecoverableException(str(error)) from error
    return bool(slots)
