"""Changes: where the tensors of a weight version differ from those of another, for a reader that holds that other one.

They are exact for tensors that are compared, and may name more elements than differ for those whose differences were
followed in a pull.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from storage import layout
from storage.store import ObjectMissing, ObjectStore
from storage.threads import Check, in_threads
from storage.weights import deltas
from storage.weights.cache import WeightCache
from storage.weights.deltas import Indices
from storage.weights.manifest import ITEM_BYTES, Manifest, TensorBlock
from storage.weights.objects import THREADS
from storage.weights.tensor_sets import read_manifest


class Changes:
    """The changes from version `since`: a pull notes what it comes across, and `places` completes it."""

    def __init__(self, since: int) -> None:
        self.since = since
        self._noted: dict[str, Indices] = {}
        self._lock = threading.Lock()

    def note(self, name: str, start: int, changed: Sequence[Indices]) -> None:
        """A pull has followed a tensor's differences from version `start` on; `changed` are their elements."""
        if start <= self.since:
            found = changed[0] if len(changed) == 1 else np.unique(np.concatenate([np.zeros(0, np.int64), *changed]))
            with self._lock:
                self._noted[name] = found

    def places(
        self,
        store: ObjectStore,
        version: int,
        manifest: Manifest,
        tensors: Mapping[str, TensorBlock],
        cache: WeightCache | None,
        check: Check = lambda: None,
    ) -> dict[str, Indices] | None:
        """The changed elements of each changed tensor of `version`, ascending; None if they cannot be known here.

        What no pull has noted is compared with the tensors that the cache holds of version `since`.
        """
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
        compared = in_threads(THREADS, partial(_compared, held, tensors), list(held), check)
        return {name: noted[name] for name in names if name in noted} | dict(compared)


def _compared(held: Mapping[str, TensorBlock], tensors: Mapping[str, TensorBlock], name: str) -> tuple[str, Indices]:
    block = tensors[name]
    return name, deltas.places(held[name].data, block.data, ITEM_BYTES[block.dtype])
