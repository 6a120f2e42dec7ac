"""The last task of an execution that evaluates: the task fails with the number of failed evaluations.

An evaluation beside training is a leaf, whose failure Flyte does not count.
"""

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import ControlPoolConfig, task_settings
from storage.errors import GleanerError
from storage.records.failures import last_failures
from storage.stores.connect import connect
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import EvaluationOutcome, IterationOutcome
from tasks.reporting.last_failures import KILLED, TaskSubject, failure_line, keep
from tasks.task_log import logged_task

DEFAULT_POOL = ControlPoolConfig()


class EvaluationsFailed(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """Training went on to its end, and evaluations beside it failed; the message says which, as far as is known."""


@task(**task_settings(DEFAULT_POOL))
def evaluations_ended(concluded: IterationOutcome, evaluated: list[list[EvaluationOutcome | None]]) -> int:
    """Count the evaluations of an execution; raises EvaluationsFailed if some failed. The next execution resumes them.

    concluded: the last iteration, after which the task runs. evaluated: the outcomes of the leaves, None for a failure.
    """
    with logged_task(f"run {concluded.run_url}", None, "counting its evaluations"):
        outcomes = [outcome for of_leaf in evaluated for outcome in of_leaf]
        failed = sum(outcome is None for outcome in outcomes)
        if failed:
            raise EvaluationsFailed(
                f"run {concluded.run_url}: training is done up to iteration {concluded.iteration}, and {failed} of "
                f"{len(outcomes)} evaluations failed; the same command goes on with what is missing. {_last(concluded)}"
            )
        return len(outcomes)


def _last(concluded: IterationOutcome) -> str:
    """The error line of the last failed evaluation; a killed evaluation left no line, and gets a line here."""
    told = f"an evaluation was killed at every attempt: {KILLED}"
    try:
        store = connect(concluded.run_url)
        found = [each for each in last_failures(store, 0) if each.task == "evaluation"]
    except StoreUnavailable as error:
        raise FlyteRecoverableException(str(error)) from error
    if found:
        return failure_line(found[0])
    work = TaskSubject(task="evaluation", run_url=concluded.run_url, iteration=concluded.weight_version)
    keep(work, RuntimeError(told), told)
    return told
