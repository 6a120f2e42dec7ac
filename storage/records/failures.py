"""The last failure of each task of a run, for people: kept until the task succeeds (docs/format.md section 2).

The records are hints. They lie outside `iterations/`, where machines that join a run write. No token depends on the
records: the trainer of a crew repeats the errors of slots to its user, and does not wait for a slot that the store has
refused for good.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field

from storage.records import layout, records
from storage.records.crew_records import execution_digest
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
ERROR_LENGTH_MAX = 1000
# So many are read; a crew of thousands that fails everywhere needs no more to be understood.
READ_MAX = 64
# Of a calendar: the end of the year 9999.
TIME_MAX_S = 253_402_300_799.0
Task = Literal["plan", "rollout", "collect", "train", "conclude", "evaluation", "score"]
_SLOT = re.compile(rf"{layout.FAILURES}rollout/([0-9a-f]{{32}})/(\d{{6,}})/\d{{5,}}\.json", re.ASCII)
_TASK = re.compile(rf"{layout.FAILURES}({'|'.join(get_args(Task))})\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """An attempt at a task ended with `error`, in one line.

    Attributes:
        iteration: the iteration of the attempt; for an evaluation the weight version.
        slot: the slot of a rollout; None for other tasks.
        host: name of the machine.
        at_s: wall-clock seconds on the machine that failed.
    """

    KIND: ClassVar[str] = "failure"
    __pydantic_config__ = STRICT
    task: Task
    iteration: int
    execution: str
    slot: int | None = None
    host: str
    error: Annotated[str, Field(max_length=ERROR_LENGTH_MAX)]
    at_s: Annotated[float, Field(ge=0, le=TIME_MAX_S)]


def keep_failure(store: ObjectStore, failure: FailureRecord) -> None:
    """Write a failure over the last failure of its task; in a rollout, of its slot in the iteration."""
    records.put(store, _key(failure), failure)


def forget_failure(store: ObjectStore, task: Task) -> None:
    """Delete the last failure of a task that has succeeded."""
    store.delete(layout.failure(task))


def forget_slots(store: ObjectStore, execution: str) -> None:
    """Delete the failures of slots in other executions; a standing member reports its own error in later iterations."""
    for key in store.list(f"{layout.FAILURES}rollout/"):
        found = _SLOT.fullmatch(key)
        if found is not None and found[1] != execution_digest(execution):
            store.delete(key)


def last_failures(store: ObjectStore, committed: int) -> list[FailureRecord]:
    """The last failure of each task and slot that has not succeeded since, newest first, as far as can be read.

    committed: number of committed iterations. A failure at a committed iteration is out of date, except for
    evaluations.
    """
    keys = [key for key in store.list(layout.FAILURES) if _is_open(key, committed)]
    keys.sort(key=lambda key: key.count("/"))  # slots come last
    found = _readable(store, keys[:READ_MAX])
    now = [each for each in found if each.task == "evaluation" or each.iteration >= committed]
    return sorted(now, key=lambda each: each.at_s, reverse=True)


def slot_failures(store: ObjectStore, iteration: int, execution: str) -> dict[int, FailureRecord]:
    """Why attempts at slots of an iteration failed in this execution, the last by slot, as far as can be read."""
    found = _readable(store, store.list(layout.slot_failures(execution_digest(execution), iteration)))
    return {each.slot: each for each in found if each.slot is not None}


def _key(failure: FailureRecord) -> str:
    if failure.slot is None:
        return layout.failure(failure.task)
    return layout.slot_failure(execution_digest(failure.execution), failure.iteration, failure.slot)


def _is_open(key: str, committed: int) -> bool:
    found = _SLOT.fullmatch(key)
    return _TASK.fullmatch(key) is not None if found is None else int(found[2]) >= committed


def _readable(store: ObjectStore, keys: list[str]) -> Iterator[FailureRecord]:
    """Yield the readable failures; skip damaged records silently, because a view looks every other second."""
    for key in keys:
        try:
            found = records.read(store, FailureRecord, key)
        except (ObjectMissing, CorruptObject):
            continue
        if _key(found) == key:
            yield found
