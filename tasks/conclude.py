"""The conclude task: verifies and commits the iteration, shows it, and deletes what is no longer needed."""

from flytekit import Deck, task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import ControlPoolConfig, task_settings
from resources.work_log import end_one
from storage.clock import SystemClock
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import IterationOutcome, PlanReference, TrainOutcome, with_code
from tasks.configuration.run_config import parse
from tasks.plan import forgo_models_in_a_container
from tasks.task_log import logged_task, place_of, work_on

DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL), enable_deck=True, deck_fields=())
def conclude(
    trained: TrainOutcome,
    last: bool,
    config: dict = {},  # type: ignore[type-arg]  # noqa: B006
) -> tuple[IterationOutcome, PlanReference, list[int], list[PlanReference]]:
    """Verify that the plan was trained, write the report, draw the Deck; `last` releases the run's lease.

    `trained` only says which iteration's training has ended: the truth is in the run's directory. config: the run's, if
    training evaluates; then the evaluation of what was published is planned, too, and returned as `prepare_beside`
    gives it.
    """
    from tasks.concluding.iteration import commit_and_report  # noqa: PLC0415 - when the task runs
    from tasks.reporting.progress import progress  # noqa: PLC0415

    forgo_models_in_a_container()
    with logged_task(place_of(trained.plan), work_on(trained.plan, "conclude"), code=trained.plan.code) as log:
        try:
            with progress() as shown:
                shown.tell(f"iteration {trained.plan.iteration}: concluding")
                outcome, tabs = commit_and_report(trained.plan, last=last)
            evaluated: tuple[PlanReference, list[int], list[PlanReference]] = (trained.plan, [], [])
            if config:
                from tasks.preparing.evaluation import prepare_beside  # noqa: PLC0415 - where it is used

                version, execution = outcome.weight_version, trained.plan.execution
                evaluated = prepare_beside(parse(config), version, execution, SystemClock(), resume=False)
                reference, slots, due = evaluated
                [reference, *due] = with_code([reference, *due], trained.plan.code)
                evaluated = (reference, slots, due)
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
        if log is not None:
            log.tell(f"committed: {outcome.measured}")
    end_one()
    for name, tab in tabs.items():
        Deck(name, tab)
    return outcome, *evaluated
