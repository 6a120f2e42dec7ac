"""The evaluation tasks: plan an evaluation as an iteration without training, and measure it when its crew has ended.

Beside training there is no task that plans: `plan` and `conclude` call `prepare_beside`.
"""

from flytekit import Deck, task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import ControlPoolConfig, task_settings
from storage.clock import SystemClock
from storage.errors import GleanerError
from storage.records import layout
from storage.records.evaluations import version_of
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import EvaluationOutcome, PlanReference, with_code
from tasks.configuration.run_config import parse
from tasks.plan import execution_name, forgo_models_in_a_container
from tasks.reporting.last_failures import TaskSubject
from tasks.task_log import check_code, logged_task

DEFAULT_POOL = ControlPoolConfig()


class EvaluationNotPlanned(GleanerError, ValueError):  # noqa: N818 - reads as what happened
    """An evaluation beside training has no plan to measure; its failure is kept in the run."""


@task(**task_settings(DEFAULT_POOL))
def plan_evaluation(
    config: dict,  # type: ignore[type-arg]
    version: int,
    code: str = "",
) -> tuple[PlanReference, list[int]]:
    """Write the plan of an evaluation, or find an existing one; returns its reference and its slots.

    An ended evaluation has no slots. Version -1 is the newest. code: as of `plan`.
    """
    from tasks.preparing.evaluation import prepare  # noqa: PLC0415 - when the task runs

    forgo_models_in_a_container()
    check_code("plan_evaluation", code)
    settings_of_run = parse(config)
    work = TaskSubject(task="evaluation", run_url=settings_of_run.run.url, iteration=version if version >= 0 else None)
    with logged_task(f"run {settings_of_run.run.url}, plan of the evaluation of version {version}", work):
        try:
            reference, slots = prepare(settings_of_run, version, execution_name(), SystemClock())
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
    [reference] = with_code([reference], code)
    return reference, slots


@task(**task_settings(DEFAULT_POOL), enable_deck=True, deck_fields=())
def evaluate(plan: PlanReference) -> EvaluationOutcome:
    """Grade what the crew has sampled, commit the evaluation's record, show it.

    Its node stands behind the crew's map; the truth is in the evaluation's directory. Raises EvaluationNotPlanned if
    the reference names a run alone.
    """
    from tasks.concluding.evaluation import measure_and_report  # noqa: PLC0415 - when the task runs

    forgo_models_in_a_container()
    try:
        run_url, name = layout.evaluated(plan.run_url)
    except ValueError:
        # What failed is kept already, and a failure of this task would take its place.
        raise EvaluationNotPlanned(
            f"the evaluation of version {plan.weight_version} of {plan.run_url} could not be planned; `gleaner status` "
            "says why"
        ) from None
    work = TaskSubject(task="evaluation", run_url=run_url, execution=plan.execution, iteration=version_of(name))
    with logged_task(f"evaluation in {plan.run_url} of version {plan.weight_version}", work, code=plan.code):
        try:
            outcome, tab = measure_and_report(plan.run_url, SystemClock(), plan.execution)
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
    Deck("Evaluation", tab)
    return outcome
