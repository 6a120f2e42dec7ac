"""The model at a weight version, whichever way that is stored: whole, as differences, or as an adapter.

Needs torch only for an adapter, which it merges into the tensors of version 0.
"""

from storage.clock import Clock
from storage.store import ObjectStore
from storage.threads import Check
from storage.weights.adapters import BASE_VERSION, adapter_of, adapter_record
from storage.weights.cache import WeightCache
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.versions import pull_version


def pull_model(
    store: ObjectStore, version: int, cache: WeightCache | None, clock: Clock, *, check: Check = lambda: None
) -> tuple[Manifest, dict[str, TensorBlock]]:
    """The manifest of a weight version, and all tensors of the model, verified; arguments and errors of `pull_version`.

    Of an adapter every byte that is merged was verified: the factors, and version 0, which the cache keeps.
    """
    manifest, tensors = pull_version(store, version, cache, clock, check=check)
    if adapter_record(manifest, version) is None:
        return manifest, tensors
    base = pull_version(store, BASE_VERSION, cache, clock, check=check)[1]
    adapter = adapter_of(manifest, version, tensors, base)
    assert adapter is not None
    check()
    from tasks.sampling.engines.adapter_merge import merged_blocks  # noqa: PLC0415 - torch takes seconds

    return manifest, merged_blocks(base, adapter)
