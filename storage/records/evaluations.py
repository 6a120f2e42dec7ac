"""A run's evaluations: ended, begun, and the weight versions that begun evaluations need."""

import logging
import re

from storage.records import layout, records
from storage.records.evaluation_records import EvaluationRecord
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)
# The key of a record, and of anything in a directory. Other keys below the prefix are ignored.
_RECORD = re.compile(rf"{layout.EVALUATIONS}(\d{{8}}-[0-9a-f]+)\.json", re.ASCII)
_INSIDE = re.compile(rf"{layout.EVALUATIONS}(\d{{8}}-[0-9a-f]+)/(.+)", re.ASCII)


def evaluations(store: ObjectStore) -> list[EvaluationRecord]:
    """The records of a run's ended evaluations, by weight version; an unreadable one is left out with a warning."""
    found = []
    for name in ended_evaluations(store):
        try:
            found.append(records.read(store, EvaluationRecord, layout.evaluation(name)))
        except (CorruptObject, ObjectMissing) as error:
            log.warning("left out: %s", error)
    return found


def ended_evaluations(store: ObjectStore) -> list[str]:
    """Names of the evaluations that have a record, in order."""
    return [match[1] for key in store.list(layout.EVALUATIONS) if (match := _RECORD.fullmatch(key))]


def begun_evaluations(store: ObjectStore) -> list[str]:
    """Names of the evaluations that have a directory and no record, in order: under way, or interrupted."""
    return list(_begun(store))


def versions_under_evaluation(store: ObjectStore) -> set[int]:
    """The weight versions of the evaluations that have begun and have no record yet."""
    return {version_of(name) for name in _begun(store)}


def version_of(name: str) -> int:
    """The weight version in an evaluation's name."""
    return int(name.partition("-")[0])


def signs_of_life(store: ObjectStore) -> tuple[list[str], list[str]]:
    """(heartbeat keys, batch keys) of all unfinished evaluations: heartbeats change, batches only appear."""
    inside = [(f"{layout.EVALUATIONS}{name}/", keys) for name, keys in _begun(store).items()]
    heartbeats, batches = (
        [f"{prefix}{key}" for prefix, keys in inside for key in keys if key.startswith(folder)]
        for folder in (layout.alive_all(0), layout.batches(0))
    )
    return heartbeats, batches


def _begun(store: ObjectStore) -> dict[str, list[str]]:
    """Maps each unfinished evaluation to the keys in its directory, with one LIST."""
    begun: dict[str, list[str]] = {}
    ended = set()
    for key in store.list(layout.EVALUATIONS):
        if match := _RECORD.fullmatch(key):
            ended.add(match[1])
        elif match := _INSIDE.fullmatch(key):
            begun.setdefault(match[1], []).append(match[2])
    return {name: keys for name, keys in begun.items() if name not in ended}
