"""Reads records that only measure: nothing of an iteration's tokens, weights or order depends on them.

A damaged record of this kind must not stop the conclusion of a trained iteration or the plan of the next iteration.
"""

import logging
from dataclasses import dataclass
from typing import ClassVar

from storage.records import layout, records
from storage.records.records import Record
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)


def read_hint(store: ObjectStore, record_type: type[Record], key: str) -> Record | None:
    """The record; None without a record, and None with a logged line for a damaged record."""
    try:
        return records.read(store, record_type, key)
    except ObjectMissing:
        return None
    except CorruptObject as error:
        log.warning("a measurement is passed over: %s", error)
        return None


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
