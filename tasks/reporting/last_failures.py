"""The last failure of each task: kept in the run when a task fails, forgotten when it succeeds, and told first.

Keeping it never hides or delays the failure itself: a store that does not take it in time is given up.
"""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resources.secret_text import environment_secrets, without_secrets
from resources.visible_text import shortened, visible
from storage.clock import SystemClock
from storage.process_identity import has_ended
from storage.records import layout
from storage.records.failures import (
    ERROR_LENGTH_MAX,
    FailureRecord,
    Task,
    forget_failure,
    forget_slots,
    keep_failure,
    last_failures,
)
from storage.records.run import AnotherRun, ConcludedByAnother, RunBusy, exists, lease_holder, next_iteration
from storage.stores.connect import connect
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from tasks.reporting.charts import utc

log = logging.getLogger(__name__)
KEEP_LIMIT_S = 10.0
KILLED = "its memory ran out, or its machine was lost; Flyte's console says which"
# Another execution or attempt does the work, or the command is not meant for this run; the run has lost nothing.
NO_FAILURES = (RunBusy, ConcludedByAnother, AnotherRun)

# What shows that a plan, or a standing member, has an iteration behind it.
_PASSED: dict[Task, Callable[[int], str]] = {"plan": layout.plan, "rollout": layout.closed}


@dataclass(frozen=True, kw_only=True)
class TaskSubject:
    """The subject of a task.

    Attributes:
        task: The kind of task.
        run_url: The run; for members of an evaluation, the directory of the evaluation.
        execution: The execution.
        iteration: None for a plan and for a standing member, whose run names the iteration.
        slot: The slot of a member; None for other tasks.
    """

    task: Task
    run_url: str
    execution: str = ""
    iteration: int | None = None
    slot: int | None = None


def keep(work: TaskSubject, error: BaseException, cause: str, limit_s: float = KEEP_LIMIT_S) -> None:
    """Write into the run that the work failed; returns after `limit_s` at the latest, and raises nothing.

    cause: why, in words. Where there is no run yet nothing is written.
    """
    if isinstance(error, NO_FAILURES):
        return

    def act(store: ObjectStore) -> None:
        if exists(store, layout.RUN):
            keep_failure(store, _record(store, work, cause))

    _within(work, limit_s, act, "the failure is not kept in the run")


def keep_silent_end(work: TaskSubject, attempt: int, limit_s: float = KEEP_LIMIT_S) -> None:
    """In a later attempt, record that the previous attempt was killed, unless the execution has recorded a failure.

    A container cannot report that its memory ran out. attempt: the number of the present attempt, from 0.
    """

    def act(store: ObjectStore) -> None:
        kept = (each for each in last_failures(store, 0) if each.execution == work.execution)
        if not any(each.task == work.task for each in kept):
            keep_failure(store, _record(store, work, f"attempt {attempt} was killed: {KILLED}"))

    if attempt:
        _within(work, limit_s, act, "that an attempt was killed is not kept in the run")


def forget(work: TaskSubject, limit_s: float = KEEP_LIMIT_S) -> None:
    """Note in the run that the work has succeeded, in the same manner; what slots failed at stays until `conclude`."""
    if work.slot is not None:
        return

    def act(store: ObjectStore) -> None:
        forget_failure(store, work.task)
        if work.task == "conclude":
            forget_slots(store, work.execution)

    _within(work, limit_s, act, "the last failure stays in the run, although the task has succeeded since")


def failure_line(failure: FailureRecord) -> str:
    """One line: what failed, when, where and why."""
    of = "version" if failure.task == "evaluation" else "iteration"
    slot = "" if failure.slot is None else f", slot {failure.slot}"
    place = f"{failure.task} of {of} {failure.iteration}{slot}"
    return visible(" ".join(f"failed: {place}, {utc(failure.at_s)}, on {failure.host}: {failure.error}".split()))


def silent_end(holder: str | None) -> str:
    """Return a line about the holder of a run's lease, if the holder is an ended process of this machine; else empty.

    A killed process leaves no word, and a single machine has no console.
    """
    if holder is None or not has_ended(holder):
        return ""
    number = holder.rsplit(":", 2)[1]
    return (
        f"ended without a word: process {number} of this machine, which advanced the run; it was interrupted, killed, "
        "or its memory ran out. The same command goes on"
    )


def holder_of(store: ObjectStore) -> str | None:
    """Who holds the run's lease, as far as can be read; None if that is free."""
    try:
        return lease_holder(store)
    except (ObjectMissing, CorruptObject, ValueError):
        return None


def failure_lines(store: ObjectStore, failed: Sequence[FailureRecord]) -> list[str]:
    """What failed last, a line each; if nothing did, that the process which advanced the run has ended without a word.

    failed: as `storage.records.failures.last_failures` gives it.
    """
    lines = [failure_line(each) for each in failed]
    return lines or [line for line in [silent_end(holder_of(store))] if line]


def one_line(text: str) -> str:
    """A text of an error on one line of bounded length, without secrets and control characters."""
    return shortened(visible(" ".join(without_secrets(text, environment_secrets()).split())), ERROR_LENGTH_MAX)


def _record(store: ObjectStore, work: TaskSubject, cause: str) -> FailureRecord:
    return FailureRecord(
        task=work.task,
        iteration=_iteration(store, work),
        execution=work.execution,
        slot=work.slot,
        host=one_line(socket.gethostname()),
        error=one_line(cause),
        at_s=max(0.0, SystemClock().wall()),
    )


def _iteration(store: ObjectStore, work: TaskSubject) -> int:
    if work.iteration is not None:
        return work.iteration
    iteration, passed = next_iteration(store), _PASSED.get(work.task)
    while passed is not None and exists(store, passed(iteration)):
        iteration += 1
    return iteration


def _within(work: TaskSubject, limit_s: float, act: Callable[[ObjectStore], None], or_else: str) -> None:
    """Run `act` on the run's store in a thread, wait for at most `limit_s`, then leave the thread behind."""

    def run() -> None:
        try:
            act(connect(work.run_url))
        except Exception as error:  # noqa: BLE001 - it must not hide the error to report, nor undo a success
            log.warning("%s: %s", or_else, one_line(str(error)))

    thread = threading.Thread(target=run, daemon=True, name="last failure")
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        log.warning("%s: the store has not answered for %.0f s", or_else, limit_s)
