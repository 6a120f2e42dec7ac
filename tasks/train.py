"""The train task: one optimizer step per iteration, on a reserved machine, following the journal."""

import os
from collections.abc import Callable

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.ending import ends_on_notice
from resources.pools import PoolConfig, pod_template
from storage.clock import Clock, SystemClock
from storage.records.records import TrainingRecord
from tasks.configuration.references import PlanReference, TrainOutcome
from tasks.live_deck import live_deck
from tasks.task_log import logged_task, place_of, work_on

DEFAULT_POOL = PoolConfig()


@task(
    interruptible=False,
    retries=DEFAULT_POOL.retries,
    pod_template=pod_template(DEFAULT_POOL),
    enable_deck=True,
    deck_fields=(),
)
def train(plan: PlanReference) -> TrainOutcome:
    """Train on the iteration's responses as their groups finish, checkpoint, and publish the next weight version.

    If the plan says so, it generates for a while first. Its Deck is live.
    """
    from tasks.learning.launch import train_here  # noqa: PLC0415
    from tasks.reporting.run_progress import run_progress  # noqa: PLC0415 - when the task runs

    with run_progress(plan.run_url), live_deck(plan.run_url):
        return trained(plan, train_here)


@ends_on_notice()
def trained(plan: PlanReference, advance: Callable[[str, int, str, Clock], TrainingRecord]) -> TrainOutcome:
    """The body of the task; raises FlyteRecoverableException if another attempt may help, and ends at SIGTERM.

    advance: `tasks.learning.train_iteration.train_iteration`, or what calls that.
    """
    from tasks.learning.launch import MAY_PASS  # noqa: PLC0415 - when the task runs
    from tasks.learning.rank_ends import RanksFailed  # noqa: PLC0415

    with logged_task(place_of(plan), work_on(plan, "train"), f"train{_rank()}", code=plan.code) as log:
        try:
            record = advance(plan.run_url, plan.iteration, plan.execution, SystemClock())
        except MAY_PASS as error:
            raise FlyteRecoverableException(str(error)) from error
        except RanksFailed as error:
            if error.failure.lasting:
                raise
            raise FlyteRecoverableException(str(error)) from error
        outcome = outcome_of(plan, record)
        if log is not None:
            log.end(f"trained to weight version {record.weight_version}, {outcome.measured}")
    return outcome


def outcome_of(plan: PlanReference, record: TrainingRecord) -> TrainOutcome:
    """What the task returns for a training record."""
    reward, loss = record.metrics.get("reward"), record.metrics.get("loss")
    return TrainOutcome(plan=plan, weight_version=record.weight_version, reward=reward, loss=loss)


def _rank() -> str:
    """Which of several ranks this process is, as torch's launcher says; empty for one."""
    count = os.environ.get("WORLD_SIZE", "1")
    return "" if count == "1" else f", rank {os.environ.get('RANK', '?')} of {count}"
