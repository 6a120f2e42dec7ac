"""Changes: where the tensors of a weight version differ from an earlier version, for a reader that holds the earlier.

Changes are exact for compared tensors. For tensors whose differences were followed in a pull, they may name equal
elements, too.
"""

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from storage.records import layout
from storage.stores.store import ObjectMissing, ObjectStore
from storage.threads import Check, in_threads
from storage.weights import deltas
from storage.weights.cache import WeightCache
from storage.weights.deltas import Indices
from storage.weights.manifest import ITEM_BYTES, Manifest, TensorBlock
from storage.weights.objects import THREADS
from storage.weights.tensor_sets import read_manifest

# The indices of changed elements take at most this share of a version's bytes in memory: an eighth of the elements in
# bfloat16, a quarter in float32. With more of them an engine gains little over the whole version.
SHARE_MAX = 0.5


class Changes:
    """The changes from version `since`: pulls note the differences that they follow, and `places` completes the rest.

    are_too_many: the indices would take more than SHARE_MAX, and are given up.
    """

    def __init__(self, since: int) -> None:
        self.since = since
        self.are_too_many = False
        self._noted: dict[str, Indices] = {}
        self._lock = threading.Lock()

    def note(self, manifest: Manifest, name: str, start: int, changed: Sequence[Indices]) -> None:
        """A pull of a manifest has followed a tensor's differences from version `start` on, at elements `changed`."""
        if start > self.since or self.are_too_many:
            return
        if sum(each.nbytes for each in changed) > _bytes_max(manifest):  # before they are sorted, which takes as much
            self.are_too_many = True
            return
        found = changed[0] if len(changed) == 1 else np.unique(np.concatenate([np.zeros(0, np.int64), *changed]))
        with self._lock:
            self._noted[name] = found
            if _bytes(self._noted) > _bytes_max(manifest):
                self.are_too_many = True
            if self.are_too_many:
                self._noted.clear()

    def places(
        self,
        store: ObjectStore,
        version: int,
        manifest: Manifest,
        tensors: Mapping[str, TensorBlock],
        cache: WeightCache | None,
        check: Check = lambda: None,
    ) -> dict[str, Indices] | None:
        """The changed elements of each changed tensor of `version`, ascending.

        None for unknown changes, or for too many. Tensors without a note are compared with the cached tensors of
        version `since`.
        """
        if self.are_too_many:
            return None
        try:
            before = read_manifest(store, layout.weights(self.since))
        except ObjectMissing:
            return None
        if {name: (e.dtype, e.shape) for name, e in before.tensors.items()} != {
            name: (e.dtype, e.shape) for name, e in manifest.tensors.items()
        }:
            return None
        names = [name for name, entry in manifest.tensors.items() if entry.digest != before.tensors[name].digest]
        noted = self._noted if self.since < version else {}
        unknown = {name: before.tensors[name] for name in names if name not in noted}
        held = cache.find(unknown, check) if cache is not None and unknown else {}
        if len(held) < len(unknown):
            return None
        found = {name: noted[name] for name in names if name in noted}
        bytes_max = _bytes_max(manifest)

        def compare(name: str) -> None:
            if _bytes(found) <= bytes_max:
                block = tensors[name]
                found[name] = deltas.places(held[name].data, block.data, ITEM_BYTES[block.dtype])

        in_threads(THREADS, compare, list(held), check)
        return found if _bytes(found) <= bytes_max else None


def _bytes(found: Mapping[str, Indices]) -> int:
    return sum(each.nbytes for each in list(found.values()))


def _bytes_max(manifest: Manifest) -> float:
    return SHARE_MAX * sum(entry.num_bytes for entry in manifest.tensors.values())
