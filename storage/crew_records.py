"""Records about a crew beside its heartbeats: which slots will not start again, and why members failed.

They lie in an iteration's directory, below the execution that they are about: another execution has its own slots.
"""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from storage import layout, records
from storage.clock import Clock
from storage.digests import digest_of
from storage.hints import read_hint
from storage.records import Record
from storage.store import ObjectStore

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
ERROR_LENGTH_MAX = 1000


@dataclass(frozen=True, kw_only=True)
class RolloutEndedRecord:
    """The rollout map of a pool has ended: the execution starts none of these slots again."""

    KIND: ClassVar[str] = "rollout ended"
    __pydantic_config__ = STRICT
    iteration: int
    execution: str
    pool: str
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """An attempt at a slot ended with this error, in one line. at_s: by the failed machine's clock, for people."""

    KIND: ClassVar[str] = "failure"
    __pydantic_config__ = STRICT
    iteration: int
    execution: str
    slot: int
    host: str
    error: str
    at_s: float


def note_rollout_ended(store: ObjectStore, iteration: int, execution: str, pool: str, slots: Iterable[int]) -> None:
    """Write that a pool's rollout map has ended."""
    record = RolloutEndedRecord(iteration=iteration, execution=execution, pool=pool, slots=tuple(slots))
    key = f"{layout.ended(iteration, _digest(execution))}{pool}.json"
    records.put(store, key, record)


def ended_slots(store: ObjectStore, iteration: int, execution: str) -> set[int]:
    """The slots that the execution does not start again in this iteration, as far as can be read."""
    notes = _readable(store, RolloutEndedRecord, layout.ended(iteration, _digest(execution)))
    return {slot for note in notes for slot in note.slots}


def note_failure(
    store: ObjectStore, iteration: int, execution: str, slot: int, host: str, error: BaseException, clock: Clock
) -> None:
    """Write why an attempt at a slot failed."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    record = FailureRecord(
        iteration=iteration,
        execution=execution,
        slot=slot,
        host=host,
        error=text if len(text) <= ERROR_LENGTH_MAX else text[: ERROR_LENGTH_MAX - 3] + "...",
        at_s=clock.wall(),
    )
    key = f"{layout.failures(iteration, _digest(execution))}{slot:05d}-{uuid.uuid4().hex[:16]}.json"
    records.put(store, key, record)


def failures(store: ObjectStore, iteration: int, execution: str) -> list[FailureRecord]:
    """Why attempts at slots failed in this execution: the last failure of each slot, as far as can be read."""
    last: dict[int, FailureRecord] = {}
    for found in _readable(store, FailureRecord, layout.failures(iteration, _digest(execution))):
        if found.slot not in last or last[found.slot].at_s <= found.at_s:
            last[found.slot] = found
    return [last[slot] for slot in sorted(last)]


def _readable(store: ObjectStore, record_type: type[Record], prefix: str) -> Iterator[Record]:
    """The records below `prefix`; these notes are hints, so one that is damaged is passed over."""
    for key in store.list(prefix):
        found = read_hint(store, record_type, key)
        if found is not None:
            yield found


def _digest(execution: str) -> str:
    """A name for keys: names of executions may hold characters that keys may not."""
    return digest_of(execution.encode())
