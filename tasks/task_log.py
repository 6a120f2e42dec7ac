"""The log of a task, with its progress, and the text of its error, for the run and for Flyte.

Flyte shows the beginning of an error in its console, and flytekit begins with a traceback. On a cluster, an error of a
task is therefore replaced by an error whose text begins with one line. Local runs keep their errors, and have a log
where standard error is no terminal; a terminal shows a line of progress (`tasks.reporting.run_progress`).
"""

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from flytekit.core.context_manager import FlyteContextManager
from flytekit.exceptions.user import FlyteRecoverableException

from resources.granted import Granted, MachineTooSmall, granted, is_in_a_pod, memory_peak
from resources.package_code import OtherCode, refuse_other_code
from resources.visible_text import shortened, show_logs, visible
from resources.work_log import WorkLog, chain_of, which_of_chain, work_log
from storage.errors import GleanerError
from storage.records.failures import Task
from storage.stores.open_sessions import close_at_exit
from storage.stores.store import StoreDenied, StoreUnavailable
from tasks.configuration.references import PlanReference
from tasks.device.gpu_check import WrongGpus
from tasks.learning.rank_ends import RanksFailed
from tasks.reporting.last_failures import TaskSubject, forget, keep, keep_silent_end

CAUSE_CHARACTERS_MAX = 400
_ADVICE: tuple[tuple[type[BaseException], str], ...] = (
    (ImportError, "The image lacks it: name an image that has it in the field image of the pool"),
    (StoreDenied, "Mend what the message says; the pod's service account must get, put, delete and list objects there"),
    (
        StoreUnavailable,
        "Look at the store, its endpoint and the network of the pod; Flyte tries again while retries are left",
    ),
)
_DISK = "Give the pod a larger disk, or lower rollout.weight_cache_bytes_max"
_GIB = 1 << 30


class TaskFailed(GleanerError):  # noqa: N818 - reads as what happened
    """A task failed on a cluster; the text begins with one line about place, cause and remedy.

    The error has no traceback of its own, because the text holds the traceback of the replaced error.
    """

    # flytekit formats the traceback that it finds here; context managers around the task set it.
    __traceback__ = property(lambda _: None, lambda _, __: None)


class TaskFailedForNow(FlyteRecoverableException):  # type: ignore[misc]  # flytekit has no types for it
    """A task failed on a cluster, and Flyte tries again; the text is as in TaskFailed."""

    __traceback__ = property(lambda _: None, lambda _, __: None)

    def __str__(self) -> str:
        # flytekit's own begins with a code.
        return str(self.args[0])


def place_of(plan: PlanReference, slot: int | None = None) -> str:
    """Run, iteration and slot in words."""
    place = f"run {plan.run_url}, iteration {plan.iteration}{which_of_chain()}"
    return place if slot is None else f"{place}, slot {slot}"


def work_on(plan: PlanReference, task: Task) -> TaskSubject:
    """The work of a task on a planned iteration."""
    return TaskSubject(task=task, run_url=plan.run_url, execution=plan.execution, iteration=plan.iteration)


@contextmanager
def logged_task(place: str, work: TaskSubject | None, what: str = "", *, code: str = "") -> Iterator[WorkLog | None]:
    """Log the beginning and the end of a task's work in the block; yields the log, or None where nothing is logged.

    Keep an error inside the block as the last failure of its task in the run, until the task succeeds. In a pod,
    replace the error by TaskFailed, or by TaskFailedForNow if Flyte may try again.

    Args:
        place: run, iteration and slot in words.
        work: the task and its iteration; None: no failure is kept.
        what: the work in words; by default the task's name.
        code: the digest of the execution's code; a pod that has other code does nothing.
    """
    show_logs()
    close_at_exit()
    is_pod, what = is_in_a_pod(), what or (work.task if work else "")
    if is_pod and work is not None and work.task == "evaluation":
        # Of other tasks, the execution's end says it.
        keep_silent_end(work, int(os.environ.get("FLYTE_ATTEMPT_NUMBER", "0")))
    if is_pod:
        told: AbstractContextManager[WorkLog | None] = work_log(f"{place}, {what}", f"granted {granted()}")
    else:
        told = work_log(f"{place}, {what}", is_brief=True) if _has_log_here() else nullcontext()
    with told as log:
        try:
            if is_pod:
                refuse_other_code(code)
            yield log
        except Exception as error:
            if work is not None:
                keep(work, _first(error), _cause(error))
            if not is_pod:
                raise
            line = error_line(place, error, granted(), *memory_peak())
            if log is not None:
                log.fail(line.removeprefix(f"{place}: "))
            kind = TaskFailedForNow if isinstance(error, FlyteRecoverableException) else TaskFailed
            raise kind(visible(line + "\n" + "".join(traceback.format_exception(error)))) from None
        if work is not None:
            forget(work)


def check_code(task: str, code: str) -> None:
    """Raise TaskFailed, with one line, in a pod with other code than the execution's.

    For tasks that read a configuration, in which other code may find faults. task: its name. code: as in `logged_task`.
    """
    if is_in_a_pod():
        try:
            refuse_other_code(code)
        except OtherCode as error:
            raise TaskFailed(error_line(task, error, granted(), *memory_peak())) from None


@contextmanager
def logged_wiring(place: str, what: str, count: int = 0) -> Iterator[None]:
    """Log the wiring of nodes on a cluster, where a pod does nothing else; on one machine the nodes run in the block.

    what: the wired nodes in words. count: the number of iterations of the run.
    """
    with logged_task(place, None, f"wiring {what}") if is_in_a_pod() else chain_of(count):
        yield


def _has_log_here() -> bool:
    """Whether a process outside a cluster has a log: an element of a map has none, and a terminal shows a line."""
    from tasks.reporting.progress import shows_line  # noqa: PLC0415 - not in a pod

    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.is_local_execution() and not shows_line()


def error_line(place: str, error: BaseException, found: Granted, peak_bytes: int | None, killed: int) -> str:
    """One line: where, the cause, what to do. peak_bytes, killed: as `memory_peak` gives them."""
    first, cause = _first(error), shortened(_cause(error), CAUSE_CHARACTERS_MAX)
    return f"{place}: {cause.rstrip('.: ')}. {_advice(first, cause, found, peak_bytes, killed)}"


def _cause(error: BaseException) -> str:
    """The kind and the message of the first error, on one line."""
    first = _first(error)
    return " ".join(f"{type(first).__name__}: {_text(first)}".split())


def _text(error: BaseException) -> str:
    """An error's message, without the code with which flytekit begins the text of its errors."""
    return str(error.args[0]) if isinstance(error, FlyteRecoverableException) and error.args else str(error)


def _first(error: BaseException) -> BaseException:
    """The first error: the cause of a FlyteRecoverableException, or the error itself."""
    is_wrapped = isinstance(error, FlyteRecoverableException) and error.__cause__ is not None
    return error.__cause__ if is_wrapped and error.__cause__ is not None else error


def _advice(error: BaseException, cause: str, found: Granted, peak_bytes: int | None, killed: int) -> str:
    if _is(error, MachineTooSmall, OtherCode, WrongGpus):
        return "Nothing was done yet"
    if killed or _is(error, MemoryError) or "out of memory" in cause.lower():
        limit = "no limit" if found.memory_bytes is None else f"{found.memory_bytes / _GIB:.2f} GiB"
        peak = "unknown" if peak_bytes is None else f"{peak_bytes / _GIB:.2f} GiB"
        return (
            f"Host memory: limit {limit}, peak {peak}, processes killed for it: {killed}. Raise memory of the pool, or "
            "lower rollout.max_responses_in_flight or trainer.micro_batch_tokens_max"
        )
    number = error.failure.errno if isinstance(error, RanksFailed) else getattr(error, "errno", None)
    is_disk = _is(error, OSError) and number == errno.ENOSPC
    found_advice = (text for kind, text in _ADVICE if _is(error, kind))
    return _DISK if is_disk else next(found_advice, "Remove the cause and give the command again; the run stays")


def _is(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Whether an error, or the error with which a rank failed in its own process, is of a given kind."""
    if isinstance(error, RanksFailed):
        return any(kind.__name__ in error.failure.kinds for kind in kinds)
    return isinstance(error, kinds)
