"""Records about a crew beside its heartbeats: which slots will not start again.

They lie in an iteration's directory, below the execution that they are about: another execution has its own slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from storage.digests import digest_of
from storage.records import layout, records
from storage.records.hints import read_hint
from storage.stores.store import ObjectStore

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class RolloutEndedRecord:
    """The rollout map of a pool has ended: the execution starts none of these slots again."""

    KIND: ClassVar[str] = "rollout ended"
    __pydantic_config__ = STRICT
    iteration: int
    execution: str
    pool: str
    slots: tuple[int, ...]


def note_rollout_ended(store: ObjectStore, iteration: int, execution: str, pool: str, slots: Iterable[int]) -> None:
    """Write that a pool's rollout map has ended."""
    record = RolloutEndedRecord(iteration=iteration, execution=execution, pool=pool, slots=tuple(slots))
    key = f"{layout.ended(iteration, execution_digest(execution))}{pool}.json"
    records.put(store, key, record)


def ended_slots(store: ObjectStore, iteration: int, execution: str) -> set[int]:
    """The slots that the execution does not start again in this iteration, as far as can be read."""
    keys = store.list(layout.ended(iteration, execution_digest(execution)))
    # These notes are hints, so one that is damaged is passed over.
    notes = (read_hint(store, RolloutEndedRecord, key) for key in keys)
    return {slot for note in notes if note is not None for slot in note.slots}


def execution_digest(execution: str) -> str:
    """A name for keys: names of executions may hold characters that keys may not."""
    return digest_of(execution.encode())
