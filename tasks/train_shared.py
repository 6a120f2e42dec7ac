"""The train task of a run whose phases a host trains: it records the groups, and waits for the weights."""

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.ending import ends_on_notice
from resources.pools import ControlPoolConfig, task_settings
from storage.clock import SystemClock
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import PlanReference, TrainOutcome
from tasks.live_deck import live_deck
from tasks.task_log import logged_task, place_of, work_on
from tasks.train import outcome_of

DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL), enable_deck=True, deck_fields=())
def train_shared(plan: PlanReference) -> TrainOutcome:
    """Follow the rollout, grade and record its groups, and return when a host has published the next weight version.

    Its Deck is live.
    """
    with live_deck(plan.run_url):
        return trained_by_host(plan)


@ends_on_notice()
def trained_by_host(plan: PlanReference) -> TrainOutcome:
    """The body of the task; raises FlyteRecoverableException if another attempt may help, and ends at SIGTERM."""
    from tasks.learning.collecting import NoHost, collect_and_wait  # noqa: PLC0415 - when the task runs

    with logged_task(place_of(plan), work_on(plan, "train"), "train on a host", code=plan.code):
        try:
            record = collect_and_wait(plan.run_url, plan.iteration, plan.execution, SystemClock())
        except (StoreUnavailable, NoHost) as error:
            raise FlyteRecoverableException(str(error)) from error
    return outcome_of(plan, record)
