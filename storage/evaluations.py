"""A run's evaluations: which have ended, and which weight versions those need that have not."""

from storage import layout, records
from storage.records import EvaluationRecord
from storage.store import ObjectStore


def evaluations(store: ObjectStore) -> list[EvaluationRecord]:
    """The records of all evaluations of a run that have ended, by weight version. Raises CorruptObject."""
    ended, _ = _names(store)
    return [records.read(store, EvaluationRecord, layout.evaluation(name)) for name in sorted(ended)]


def versions_under_evaluation(store: ObjectStore) -> set[int]:
    """The weight versions that evaluations sample from which have begun and have no record yet."""
    ended, begun = _names(store)
    return {int(name.partition("-")[0]) for name in begun - ended}


def _names(store: ObjectStore) -> tuple[set[str], set[str]]:
    """Names of the evaluations that have ended, and of those that have a directory; with one LIST."""
    ended, begun = set(), set()
    for key in store.list(layout.EVALUATIONS):
        name, slash, _ = key.removeprefix(layout.EVALUATIONS).partition("/")
        if slash and name.partition("-")[0].isdecimal():
            begun.add(name)
        elif not slash and name.endswith(".json"):
            ended.add(name.removesuffix(".json"))
    return ended, begun
