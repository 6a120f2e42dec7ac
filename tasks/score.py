"""The task of a scorer: one machine of `teacher.pool` scores an iteration's responses by the teacher."""

import os

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.notice import EXIT_CODE, PreemptionNotice
from resources.pools import PoolConfig, pod_template
from storage.clock import SystemClock
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import PlanReference
from tasks.device.gpu_check import WrongNode
from tasks.task_log import logged_task, place_of, work_on

DEFAULT_POOL = PoolConfig(interruptible=True)
# What a scorer imports when it runs.
IMPORTS = ("tasks.learning.score_iteration", "transformers.modeling_utils")


@task(interruptible=True, retries=DEFAULT_POOL.retries, pod_template=pod_template(DEFAULT_POOL))
def score(scorer: int, plan: PlanReference) -> int:
    """Score responses as their groups end; returns the number of responses scored.

    On SIGTERM the process ends with 137, which Flyte always counts as a loss of the machine: the next attempt goes on
    at the first token without a score.
    """
    from tasks.learning.score_iteration import score_iteration  # noqa: PLC0415 - when the task runs
    from tasks.sampling.engines.engine import EngineDied  # noqa: PLC0415
    from tasks.sampling.session.session_outcome import Preempted  # noqa: PLC0415

    with logged_task(place_of(plan), work_on(plan, "score"), f"scorer {scorer}", code=plan.code) as log:
        with PreemptionNotice() as notice:
            try:
                scored = score_iteration(plan.run_url, plan.iteration, scorer, lambda: notice.given, SystemClock())
            except Preempted:
                if log is not None:
                    log.end("ends on notice (SIGTERM): its scores are written, and other scorers go on")
                os._exit(EXIT_CODE)
            except (StoreUnavailable, EngineDied, WrongNode) as error:
                raise FlyteRecoverableException(str(error)) from error
        if log is not None:
            log.end(f"ends: {scored:,} responses scored")
    return scored
