"""Reads records that only measure: nothing of an iteration's tokens, weights or order depends on them.

A damaged one must not keep a trained iteration from being concluded, or the next one from being planned.
"""

import logging

from storage.records import records
from storage.records.records import Record
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)


def read_hint(store: ObjectStore, record_type: type[Record], key: str) -> Record | None:
    """The record; None if there is none, or if it is damaged, which one line says."""
    try:
        return records.read(store, record_type, key)
    except ObjectMissing:
        return None
    except CorruptObject as error:
        log.warning("a measurement is passed over: %s", error)
        return None
