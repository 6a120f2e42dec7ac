"""The standing task: an element of a standing map, which works on every iteration of an execution."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from flytekit import task

from resources.pools import pod_template
from storage.clock import SystemClock
from tasks.configuration.references import PlanReference, SlotOutcome
from tasks.rollout import DEFAULT_POOL, attempt

if TYPE_CHECKING:
    from tasks.sampling.session.session_outcome import SessionOutcome


@task(interruptible=True, retries=DEFAULT_POOL.retries, pod_template=pod_template(DEFAULT_POOL))
def stand(slot: int, plan: PlanReference, iterations: int) -> SlotOutcome:
    """Fill the slot of every plan of the execution, until the last of its iterations is closed.

    What `rollout` says of SIGTERM and failures holds here, too.

    Args:
        slot: the number of the slot
        plan: the execution's first iteration
        iterations: how many the execution has
    """
    from tasks.sampling.session.standing import Post  # noqa: PLC0415 - when the task runs
    from tasks.sampling.session.standing import stand as stand_at  # noqa: PLC0415

    post = Post(run_url=plan.run_url, execution=plan.execution, slot=slot, first=plan.iteration, iterations=iterations)

    def live(notice: Callable[[], bool]) -> "SessionOutcome":
        return stand_at(post, notice, SystemClock())

    return attempt(plan, slot, live, iterations)
