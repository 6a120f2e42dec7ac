"""The model at a weight version, whichever way that is stored: whole, as differences, or as an adapter."""

from collections.abc import Mapping
from functools import partial

from storage.clock import Clock
from storage.records import layout
from storage.stores.store import ObjectStore
from storage.threads import Check
from storage.weights.adapters import BASE_VERSION, adapter_of, adapter_record
from storage.weights.cache import WeightCache
from storage.weights.changes import Changes
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import pull_version
from tasks.sampling.engines.adapted_weights import AdaptedWeights
from tasks.sampling.engines.patched_weights import PatchedWeights


def pull_model(
    store: ObjectStore,
    version: int,
    cache: WeightCache | None,
    clock: Clock,
    *,
    check: Check = lambda: None,
    held: int | None = None,
) -> tuple[Manifest, Mapping[str, TensorBlock]]:
    """The manifest of a weight version, and all tensors of the model, verified; arguments and errors of `pull_version`.

    `held` is an engine's `patch_base`, for which a version stored as tensors gives PatchedWeights. An adapter gives
    AdaptedWeights. Every byte that is merged was verified: the factors here, and version 0, which the cache keeps, when
    it is read.
    """
    changes = None if held is None or held == version else Changes(held)
    manifest, tensors = pull_version(store, version, cache, clock, check=check, changes=changes)
    if adapter_record(manifest, version) is None:
        if changes is None:
            return manifest, tensors
        read_places = partial(changes.places, store, version, manifest, tensors, cache, check)
        return manifest, PatchedWeights(tensors, changes.since, read_places)
    base = read_manifest(store, layout.weights(BASE_VERSION))
    adapter = adapter_of(manifest, version, tensors, {name: entry.shape for name, entry in base.tensors.items()})
    assert adapter is not None

    def read_base() -> Mapping[str, TensorBlock]:
        return pull_version(store, BASE_VERSION, cache, clock, check=check)[1]

    return manifest, AdaptedWeights(adapter, read_base)
