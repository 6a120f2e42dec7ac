"""Reads records that only measure: nothing of an iteration's tokens, weights or order depends on them.

A damaged record of this kind must not stop the conclusion of a trained iteration or the plan of the next iteration.
"""

import logging

from storage.records import records
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
