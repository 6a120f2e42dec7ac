"""Records of why an attempt to train a phase stopped, in the run's directory, for the run's own tasks and for people.

What a host leaves counts for the execution that advanced the run then. The next execution's phase is attempted again.
"""

from dataclasses import dataclass
from typing import ClassVar

from storage.records import layout, records
from storage.records.records import STRICT
from storage.records.run import execution_of
from storage.stores.store import ObjectMissing, ObjectStore


@dataclass(frozen=True, kw_only=True)
class NonFiniteRecord:
    """nonfinite.json: why the last attempt to train an iteration stopped, before it changed anything that is stored.

    quantity: what was infinite or not a number. responses: those that may have caused it. batches: their micro-batches.
    weight_version: the policy that sampled them. message: for people.
    """

    KIND: ClassVar[str] = "nonfinite"
    __pydantic_config__ = STRICT
    iteration: int
    quantity: str
    responses: tuple[int, ...]
    batches: tuple[int, ...]
    weight_version: int
    message: str


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
    execution = execution_of(store, iteration) or ""
    failure = PhaseFailureRecord(iteration=iteration, execution=execution, message=message)
    records.put(store, layout.phase_failure(iteration), failure)


def phase_failure(store: ObjectStore, iteration: int) -> str | None:
    """Why the iteration's phase fails in the execution that advances the run now; None if it may be attempted."""
    try:
        failure = records.read(store, PhaseFailureRecord, layout.phase_failure(iteration))
    except ObjectMissing:
        return None
    return failure.message if failure.execution == (execution_of(store, iteration) or "") else None
