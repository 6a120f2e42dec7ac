"""The record that a host could not train a phase, which it leaves in the run's directory for the run's own tasks.

It counts for the execution that advanced the run then. The next execution's phase is attempted again.
"""

from dataclasses import dataclass
from typing import ClassVar

from storage import layout, records
from storage.records import STRICT, SettingsRecord
from storage.store import ObjectMissing, ObjectStore


@dataclass(frozen=True, kw_only=True)
class PhaseFailureRecord:
    """phase_failure.json: why the last attempt to train an iteration on a host failed, so that no attempt will succeed.

    execution: the one that advanced the run. message: for people.
    """

    KIND: ClassVar[str] = "phase failure"
    __pydantic_config__ = STRICT
    iteration: int
    execution: str
    message: str


def fail_phase(store: ObjectStore, iteration: int, message: str) -> None:
    """Record that the iteration's phase fails in the execution that advances the run now."""
    failure = PhaseFailureRecord(iteration=iteration, execution=_execution(store, iteration), message=message)
    records.put(store, layout.phase_failure(iteration), failure)


def phase_failure(store: ObjectStore, iteration: int) -> str | None:
    """Why the iteration's phase fails in the execution that advances the run now; None if it may be attempted."""
    try:
        failure = records.read(store, PhaseFailureRecord, layout.phase_failure(iteration))
    except ObjectMissing:
        return None
    return failure.message if failure.execution == _execution(store, iteration) else None


def _execution(store: ObjectStore, iteration: int) -> str:
    """The execution that advances the run now; empty if none has begun the iteration."""
    try:
        return records.read(store, SettingsRecord, layout.settings(iteration)).execution
    except ObjectMissing:
        return ""
