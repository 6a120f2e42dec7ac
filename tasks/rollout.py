"""The rollout task: one element of the map, one slot of the crew, on an interruptible machine."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.notice import EXIT_CODE, PreemptionNotice
from resources.pools import PoolConfig, pod_template
from storage.clock import SystemClock
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import PlanReference, SlotOutcome
from tasks.device.gpu_check import WrongNode
from tasks.reporting.last_failures import TaskSubject
from tasks.task_log import logged_task, place_of

if TYPE_CHECKING:
    from tasks.sampling.session.session_outcome import SessionOutcome

DEFAULT_POOL = PoolConfig(interruptible=True)
# What a slot imports when it runs. vLLM is left out, because it prepares its processes itself.
IMPORTS = (
    "tasks.sampling.session.member",
    "tasks.sampling.engines.torch_engine",
    "tasks.sampling.engines.fused_decoder",
    "tasks.sampling.engines.hf_decoder",
    "transformers.modeling_utils",
    "flytekit.extras.pytorch",
    "flytekit.types.numpy",
    "flytekit.types.structured.basic_dfs",
    "flytekit.types.schema.types_pandas",
)


@task(interruptible=True, retries=DEFAULT_POOL.retries, pod_template=pod_template(DEFAULT_POOL))
def rollout(slot: int, plan: PlanReference) -> SlotOutcome:
    """Generate a slot's responses, resuming each at the token where the journal ends.

    On SIGTERM everything is flushed and the process exits with 137, which Flyte always counts as a loss of the machine
    and retries without using up `retries`. Any other failure is noted in the run; the trainer reports it if no process
    is left to generate.
    """
    from tasks.sampling.session.member import generate_slot  # noqa: PLC0415 - when the task runs

    def live(notice: Callable[[], bool]) -> "SessionOutcome":
        clock = SystemClock()
        return generate_slot(plan.run_url, plan.iteration, slot, notice, clock, execution=plan.execution)

    return attempt(plan, slot, live)


def attempt(
    plan: PlanReference, slot: int, live: "Callable[[Callable[[], bool]], SessionOutcome]", iterations: int = 1
) -> SlotOutcome:
    """Live as a member until it leaves; what it must do when it is told to go, or fails, is in the task's docstring.

    live: gets a function that says whether notice was given. iterations: how many the member works on, from the plan's
    on.
    """
    from tasks.sampling.engines.engine import EngineDied  # noqa: PLC0415 - when the task runs
    from tasks.sampling.session.session_outcome import Preempted  # noqa: PLC0415

    # A standing member fails at the iteration that the run has come to.
    at = plan.iteration if iterations == 1 else None
    work = TaskSubject(task="rollout", run_url=plan.run_url, execution=plan.execution, iteration=at, slot=slot)
    what = "rollout" if iterations == 1 else "standing crew"
    with logged_task(place_of(plan, slot), work, what, code=plan.code) as log, PreemptionNotice() as notice:
        try:
            outcome = live(lambda: notice.given)
        except Preempted:
            if log is not None:
                log.end("ends on notice (SIGTERM): its tokens are written, and other members go on with them")
            os._exit(EXIT_CODE)
        except Exception as error:
            if isinstance(error, StoreUnavailable | EngineDied | WrongNode):
                # The next attempt may meet a better store or a better machine. Any other exception
                # ends the slot, whatever `retries` says.
                raise FlyteRecoverableException(str(error)) from error
            raise
        if log is not None:
            log.end(
                f"ends: {outcome.responses_finished:,} responses ended, {outcome.tokens_generated:,} tokens generated"
            )
    return SlotOutcome(
        slot=slot,
        incarnation=outcome.incarnation,
        tokens_generated=outcome.tokens_generated,
        tokens_recovered=outcome.tokens_recovered,
        responses_finished=outcome.responses_finished,
    )
