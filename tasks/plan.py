"""The plan task: checks everything, opens the run, and writes the next iteration's plan."""

from flytekit import current_context, task
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import ControlPoolConfig, task_settings
from storage.clock import SystemClock
from storage.process_identity import process_name
from storage.records.run import ConcludedByAnother
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import PlanReference, with_code
from tasks.configuration.run_config import parse
from tasks.prompts.auto_tokenizer import forgo_models
from tasks.reporting.last_failures import TaskSubject
from tasks.task_log import check_code, logged_task

DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL))
def plan(
    config: dict,  # type: ignore[type-arg]
    after: int,
    pools: list[str],
    ahead: int = 0,
    last: bool = False,
    evaluates: bool = False,
    code: str = "",
) -> tuple[PlanReference, list[list[int]], PlanReference, PlanReference, list[int], list[PlanReference]]:
    """Write the next iteration's plan, or find the one that an earlier attempt wrote.

    Returns the plan's reference, its slots by pool, the reference of the iteration to train next (the first uncommitted
    iteration, which with `ahead` is an earlier one), and the evaluation beside the plan as `prepare_beside` gives it.
    Every error in the input is found here, before a GPU is paid for and before anything is created.

    Args:
        config: the run's configuration
        after: an iteration from the task that must end first; used for the order of tasks alone
        pools: the crew's pools for which the workflow has machines; slots are returned in the order of pools
        ahead: the number of planned but uncommitted iterations that are passed over; they need not be trained yet
        last: the planned iteration is the last of the execution
        evaluates: also plan the evaluation of the weights with which the execution begins, or resume an interrupted one
        code: the digest of the code with which the execution was registered, which all of its pods must have
    """
    from tasks.preparing.iteration import WeightsTooOld, prepare, to_train  # noqa: PLC0415 - when the task runs
    from tasks.reporting.progress import progress  # noqa: PLC0415

    del after
    check_code("plan", code)
    forgo_models_in_a_container()
    settings, clock = parse(config), SystemClock()
    work = TaskSubject(task="plan", run_url=settings.run.url, execution=execution_name())
    with logged_task(f"run {settings.run.url}, plan of the next iteration", work) as log:
        try:
            with progress() as shown:
                shown.tell("planning an iteration")
                reference, slots = prepare(
                    settings, work.execution, clock, ahead=ahead, pools=pools, ends_execution=last
                )
            trains = to_train(settings, reference) if ahead else reference
            evaluated: tuple[PlanReference, list[int], list[PlanReference]] = (reference, [], [])
            if evaluates:
                from tasks.preparing.evaluation import prepare_beside  # noqa: PLC0415 - where it is used

                evaluated = prepare_beside(settings, reference.iteration, work.execution, clock, resume=True)
        except (StoreUnavailable, WeightsTooOld, ConcludedByAnother) as error:
            raise FlyteRecoverableException(str(error)) from error
        if log is not None:
            log.end(f"iteration {reference.iteration} is planned for {sum(map(len, slots))} slots")
    evaluation, slots_of_evaluation, due = evaluated
    reference, trains, evaluation, *due = with_code([reference, trains, evaluation, *due], code)
    return reference, slots, trains, evaluation, slots_of_evaluation, due


def execution_name() -> str:
    """The name of the execution that advances the run: Flyte's name, or on one machine the name of the process."""
    name = current_context().execution_id.name
    return process_name() if name == "local" else name


def forgo_models_in_a_container() -> None:
    """Load no torch for a tokenizer in a process that ends with this task; another process may train next."""
    state = FlyteContextManager.current_context().execution_state
    if state is not None and state.mode is ExecutionState.Mode.TASK_EXECUTION:
        forgo_models()
