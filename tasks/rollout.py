"""The rollout task: one element of the map, one slot of the crew, on an interruptible machine."""

import os

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.notice import EXIT_CODE, PreemptionNotice
from resources.pools import PoolConfig, pod_template
from storage.clock import SystemClock
from storage.store import StoreUnavailable
from tasks.configuration.references import PlanReference, SlotOutcome
from tasks.sampling.engine import EngineDied
from tasks.sampling.member import generate_slot
from tasks.sampling.session import Preempted

DEFAULT_POOL = PoolConfig(interruptible=True)


@task(interruptible=True, retries=DEFAULT_POOL.retries, pod_template=pod_template(DEFAULT_POOL))
def rollout(slot: int, plan: PlanReference) -> SlotOutcome:
    """Generate a slot's responses, resuming each at the token where the journal ends.

    On SIGTERM everything is flushed and the process exits with 137, which Flyte always counts as a loss of the machine
    and retries without using up `retries`.
    """
    with PreemptionNotice() as notice:
        try:
            outcome = generate_slot(plan.run_url, plan.iteration, slot, lambda: notice.given, SystemClock())
        except Preempted:
            os._exit(EXIT_CODE)
        except (StoreUnavailable, EngineDied) as error:
            # The next attempt may meet a better store or, where an engine died, a better machine.
            # Anything else than this exception would fail the whole map at once, whatever `retries` says.
            raise FlyteRecoverableException(str(error)) from error
    return SlotOutcome(
        slot=slot,
        incarnation=outcome.incarnation,
        tokens_generated=outcome.tokens_generated,
        tokens_recovered=outcome.tokens_recovered,
        responses_finished=outcome.responses_finished,
    )
