"""The evaluation tasks: plan an evaluation as an iteration without training, and measure it when its crew has ended."""

import logging

from flytekit import Deck, task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import ControlPoolConfig, task_settings
from storage import layout
from storage.clock import SystemClock
from storage.evaluations import version_of
from storage.store import StoreUnavailable
from tasks.configuration.references import EvaluationOutcome, PlanReference
from tasks.configuration.run_config import parse
from tasks.plan import execution_name, forgo_models_in_a_container
from tasks.pod_story import tells
from tasks.reporting.last_failures import Work

log = logging.getLogger(__name__)
DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL))
def plan_evaluation(
    config: dict,  # type: ignore[type-arg]
    version: int,
    only_if_due: bool,
    resume: bool = False,
) -> tuple[PlanReference, list[int], bool]:
    """Write the plan of an evaluation, or find an existing one; returns its reference, slots, and whether it is due.

    An ended evaluation has no slots. With `only_if_due`, an evaluation is due if evaluation.interval divides `version`
    and the run still holds that version: training that was faster does not wait for it. resume: if there is nothing
    left to begin for `version`, take an evaluation that was interrupted (`interrupted_version`).
    """
    from tasks.evaluation.measure import ITERATION, evaluation_of  # noqa: PLC0415 - when the task runs
    from tasks.preparing.evaluation import VersionGone, interrupted_version, prepare  # noqa: PLC0415

    forgo_models_in_a_container()
    settings_of_run = parse(config)
    try:
        version = interrupted_version(settings_of_run, version) if resume else version
    except StoreUnavailable as error:
        raise FlyteRecoverableException(str(error)) from error
    reference = PlanReference(
        run_url=settings_of_run.run.url, iteration=ITERATION, weight_version=version, execution=execution_name()
    )
    if only_if_due and not evaluation_of(settings_of_run).is_due(version):
        return reference, [], False
    work = Work(task="evaluation", run_url=settings_of_run.run.url, iteration=version if version >= 0 else None)
    with tells(f"run {reference.run_url}, plan of the evaluation of version {version}", work):
        try:
            reference, slots = prepare(settings_of_run, version, reference.execution, SystemClock())
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
        except VersionGone as error:
            if not only_if_due:
                raise
            log.warning("left out: %s", error)
            return reference, [], False
    return reference, slots, True


@task(**task_settings(DEFAULT_POOL), enable_deck=True, deck_fields=())
def evaluate(plan: PlanReference, due: bool, beside_training: bool = False) -> EvaluationOutcome:
    """Grade what the crew has sampled, commit the evaluation's record, show it; do nothing if it is not due.

    Its node stands behind the crew's map; the truth is in the evaluation's directory. beside_training: if no process
    can finish the evaluation now, leave it to a later execution, because a failure of this node would end the
    trainer's, too.
    """
    from tasks.concluding.evaluation import measure_and_tell  # noqa: PLC0415 - when the task runs
    from tasks.learning.follow import GroupTimeout  # noqa: PLC0415
    from tasks.sampling.session.crew_watch import CrewLost  # noqa: PLC0415

    forgo_models_in_a_container()
    if not due:
        return EvaluationOutcome(run_url=plan.run_url, evaluation="", weight_version=plan.weight_version, metrics={})
    run_url, name = layout.evaluated(plan.run_url)
    work = Work(task="evaluation", run_url=run_url, execution=plan.execution, iteration=version_of(name))
    with tells(f"evaluation in {plan.run_url} of version {plan.weight_version}", work):
        try:
            outcome, tab = measure_and_tell(plan.run_url, SystemClock(), plan.execution)
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
        except (CrewLost, GroupTimeout) as error:
            if not beside_training:
                raise
            log.warning("left to a later execution: %s", error)
            return EvaluationOutcome(
                run_url=plan.run_url, evaluation="", weight_version=plan.weight_version, metrics={}
            )
    Deck("Evaluation", tab)
    return outcome
