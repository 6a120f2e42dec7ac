"""The train task: one optimizer step per iteration, on a reserved machine, following the journal."""

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import PoolConfig, pod_template
from storage.clock import SystemClock
from storage.store import StoreUnavailable
from tasks.configuration.references import PlanReference, TrainOutcome
from tasks.learning.advance import advance
from tasks.sampling.engine import EngineDied

DEFAULT_POOL = PoolConfig()


@task(interruptible=False, retries=DEFAULT_POOL.retries, pod_template=pod_template(DEFAULT_POOL))
def train(plan: PlanReference) -> TrainOutcome:
    """Train on the iteration's responses as their groups finish, checkpoint, and publish the next weight version.

    Where the plan says so, it generates for a while first.
    """
    return trained(plan)


def trained(plan: PlanReference) -> TrainOutcome:
    """The body of the task; raises FlyteRecoverableException where another attempt may help."""
    try:
        record = advance(plan.run_url, plan.iteration, plan.execution, SystemClock())
    except (StoreUnavailable, EngineDied) as error:
        raise FlyteRecoverableException(str(error)) from error
    return TrainOutcome(weight_version=record.weight_version, reward=record.metrics["reward"])
