"""The record of a collector: time and requests spent on following, grading and recording an iteration's groups."""

from dataclasses import dataclass
from typing import ClassVar

from storage.records import layout, records
from storage.records.hints import read_hint
from storage.stores.store import ObjectStore


@dataclass(frozen=True, kw_only=True)
class CollectedRecord:
    """collected.json: the groups were recorded until the train phase was due.

    Attributes:
        seconds: duration of the recording attempt, by the clock of its process.
        puts, gets: requests of the attempt to the store.
    """

    KIND: ClassVar[str] = "collected"
    __pydantic_config__ = records.STRICT
    iteration: int
    seconds: float
    puts: int
    gets: int


def collected(store: ObjectStore, iteration: int) -> CollectedRecord | None:
    """The record of an iteration; None if the trainer recorded all groups itself, or if the record is damaged."""
    return read_hint(store, CollectedRecord, layout.collected(iteration))
