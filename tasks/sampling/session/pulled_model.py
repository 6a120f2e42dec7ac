"""The model at a weight version, whichever way that is stored: whole, as differences, or as an adapter."""

from collections.abc import Mapping

from storage import layout
from storage.clock import Clock
from storage.store import ObjectStore
from storage.threads import Check
from storage.weights.adapters import BASE_VERSION, adapter_of, adapter_record
from storage.weights.cache import WeightCache
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import pull_version
from tasks.sampling.engines.adapted_weights import AdaptedWeights


def pull_model(
    store: ObjectStore, version: int, cache: WeightCache | None, clock: Clock, *, check: Check = lambda: None
) -> tuple[Manifest, Mapping[str, TensorBlock]]:
    """The manifest of a weight version, and all tensors of the model, verified; arguments and errors of `pull_version`.

    An adapter gives AdaptedWeights. Every byte that is merged was verified: the factors here, and version 0, which the
    cache keeps, when it is read.
    """
    manifest, tensors = pull_version(store, version, cache, clock, check=check)
    if adapter_record(manifest, version) is None:
        return manifest, tensors
    base = read_manifest(store, layout.weights(BASE_VERSION))
    adapter = adapter_of(manifest, version, tensors, {name: entry.shape for name, entry in base.tensors.items()})
    assert adapter is not None

    def read_base() -> Mapping[str, TensorBlock]:
        return pull_version(store, BASE_VERSION, cache, clock, check=check)[1]

    return manifest, AdaptedWeights(adapter, read_base)
