"""Stored versions, from their names alone: which are complete, and from which checkpoint a version is restored."""

from collections import defaultdict
from dataclasses import dataclass

from storage.records import layout
from storage.records.run import exists, read_run
from storage.stores.store import ObjectMissing, ObjectStore


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The versions below `weights/` or `checkpoints/`.

    Attributes:
        keys: keys of each version.
        complete: versions with a manifest.
    """

    keys: dict[int, list[str]]
    complete: frozenset[int]

    @property
    def newest(self) -> int:
        """The newest complete version; -1 if there is none."""
        return max(self.complete, default=-1)

    def newest_up_to(self, version: int) -> int:
        """The newest complete version that is not above `version`; 0 if there is none."""
        return max((each for each in self.complete if each <= version), default=0)


def list_versions(store: ObjectStore, prefix: str) -> Versions:
    """The versions below `prefix` (layout.WEIGHTS or layout.CHECKPOINTS), with one LIST; other keys are ignored."""
    keys: dict[int, list[str]] = defaultdict(list)
    complete = set()
    for key in store.list(prefix):
        number, _, name = key.removeprefix(prefix).partition("/")
        if number.isdecimal() and name:
            keys[int(number)].append(key)
            if key == layout.manifest(f"{prefix}{number}/"):
                complete.add(int(number))
    return Versions(keys=dict(keys), complete=frozenset(complete))


def newest_of(versions: Versions, count: int) -> list[int]:
    """The `count` newest complete versions, in ascending order."""
    return sorted(versions.complete)[-count:]


def restored_from(store: ObjectStore, version: int) -> int:
    """The version whose checkpoint a trainer of `version` reads: the newest up to it; 0 stands for the first weights.

    The iterations from there to `version` are replayed.
    """
    if version == 0 or exists(store, layout.manifest(layout.checkpoint(version))):
        return version
    return list_versions(store, layout.CHECKPOINTS).newest_up_to(version)


def restored_checkpoint(store: ObjectStore, version: int) -> str | None:
    """The prefix of the checkpoint that a trainer reads for `version`, one of `restored_from`; None: weights alone.

    Version 0 has a checkpoint in a run that began with the optimizer of another run.
    """
    if version == 0:
        try:
            origin = read_run(store).origin
        except ObjectMissing:
            return None
        if origin is None or origin.optimizer is None:
            return None
    return layout.checkpoint(version)
