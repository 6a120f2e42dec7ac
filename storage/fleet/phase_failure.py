"""Records of why an attempt to train a phase stopped, in the run's directory, for the run's own tasks and for people.

A failure record counts only for the execution that advanced the run at the failure; later executions attempt the phase
again.
"""

from dataclasses import dataclass
from typing import ClassVar

from storage.records import layout, records
from storage.records.records import STRICT
from storage.records.run import execution_of
from storage.stores.store import ObjectMissing, ObjectStore


@dataclass(frozen=True, kw_only=True)
class NonFiniteRecord:
    """nonfinite.json: why the last attempt to train an iteration stopped, before it changed any stored object.

    Attributes:
        quantity: the quantity that was infinite or not a number.
        responses: responses that may be the cause.
        batches: micro-batches of these responses.
        weight_version: the policy that sampled the responses.
        message: for people.
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
    """phase_failure.json: why the last attempt to train an iteration on a host failed, and no attempt will succeed.

    Attributes:
        execution: the execution that advanced the run.
        message: for people.
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
