"""Weight versions: publishing as differences to the version before, and pulling in the cheapest way.

Owns which versions are stored whole and which versions a reader may need; storage/weights/fetch.py finds the way to a
version (docs/format.md section 7). Each tensor is handed out only after a check of its digest, whatever its way.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from storage.clock import Clock
from storage.digests import digest_of
from storage.records import layout, records
from storage.records.run import exists
from storage.stores.store import ConflictingRecord, ObjectStore
from storage.threads import Check
from storage.weights import deltas
from storage.weights.cache import WeightCache
from storage.weights.changes import Changes
from storage.weights.fetch import Fetch, base_of
from storage.weights.manifest import (
    DIFFERENCE,
    ITEM_BYTES,
    Manifest,
    TensorBlock,
    TensorEntry,
)
from storage.weights.objects import THREADS
from storage.weights.tensor_sets import (
    Draft,
    digest_all,
    draft_set,
    read_manifest,
    same_tensors,
    with_metadata,
)

DIFFERENCE_SHARE_MAX = 0.8  # of a tensor's bytes; a difference that saves less is not worth the chain behind it
# Of ten versions one is stored whole: a new machine reads at most nine differences, of 1 to 3 % of a version each in
# bfloat16 at a learning rate of 1e-6.
WEIGHTS_FULL_INTERVAL = 10
CHAIN_SHARE_MAX = 1.0  # of a version's bytes: the most that a reader of any version reads beside a whole version


def publish_version(
    store: ObjectStore,
    version: int,
    tensors: Mapping[str, TensorBlock],
    metadata: Mapping[str, Any],
    *,
    base: Mapping[str, TensorBlock],
    full_interval: int,
    before_manifest: Callable[[], Mapping[str, Any]] = dict,
) -> Manifest:
    """Publish weight version `version` (1 or more); returns the manifest that is stored.

    `base` should hold the tensors of version - 1. The digests expose a tensor of another version, which costs bytes,
    never correctness. Every `full_interval` versions, or when the differences since the last whole version exceed
    CHAIN_SHARE_MAX, all tensors are stored whole; the differences are stored beside them for readers that hold the
    version before. Publishing equal tensors again returns the first manifest. `before_manifest` is called when only the
    manifest is missing, and returns more metadata; a caller can use it to write objects that must be durable ahead of
    the manifest. Raises ConflictingRecord if other tensors are published as this version, ObjectMissing if version - 1
    is not published.
    """
    prefix = layout.weights(version)
    digests = digest_all(tensors)
    if exists(store, layout.manifest(prefix)):
        before_manifest()
        return same_tensors(store, prefix, tensors, digests)
    before = read_manifest(store, layout.weights(version - 1))
    drafts = _differences(tensors, digests, before, base)
    last = _last_whole(store, version - 1, before)
    differences = [draft.payload for draft in drafts.values() if draft.payload and draft.encoding == DIFFERENCE]
    chain_bytes = last.chain_bytes + sum(block.num_bytes for block in differences)
    if version % full_interval == 0 or chain_bytes > CHAIN_SHARE_MAX * sum(b.num_bytes for b in tensors.values()):
        known = {name: draft for name, draft in drafts.items() if draft.encoding != "full"}
        if known:
            # Of two publishers one is first; readers compare the result of its differences with the manifest.
            draft_set(known, {}, base=version - 1).write(store, prefix, layout.delta_manifest(prefix))
        drafts = _whole(last, tensors, digests)
    chained = any(draft.encoding != "full" for draft in drafts.values())
    drafted = draft_set(drafts, metadata, base=version - 1 if chained else None)
    drafted.write_objects(store, prefix)
    manifest = with_metadata(drafted.manifest, before_manifest())
    assert {name: entry.digest for name, entry in manifest.tensors.items()} == dict(digests), (
        f"the manifest of weight version {version} is not of the tensors that are published"
    )
    if records.commit(store, layout.manifest(prefix), manifest):
        return manifest
    return same_tensors(store, prefix, tensors, digests)


def repeat_version(store: ObjectStore, version: int, metadata: Mapping[str, Any]) -> bool:
    """Publish the tensors of version - 1 once more, as `version`, without reading a tensor; True if that is stored.

    False, with nothing written, if version - 1 is stored as differences. Raises ConflictingRecord if other tensors are
    published as this version, ObjectMissing if version - 1 is not published.
    """
    before = read_manifest(store, layout.weights(version - 1))
    if base_of(before, version - 1) is not None:
        return False
    entries = {
        name: replace(entry, version=version - 1 if entry.version is None else entry.version)
        for name, entry in before.tensors.items()
    }
    manifest = Manifest(tensors=entries, objects={}, metadata=dict(metadata), base=None)
    if not records.commit(store, layout.manifest(layout.weights(version)), manifest):
        digests = {name: entry.digest for name, entry in entries.items()}
        stored = read_manifest(store, layout.weights(version)).tensors
        if {name: entry.digest for name, entry in stored.items()} != digests:
            raise ConflictingRecord(f"weight version {version} is published with other tensors than {version - 1}")
    return True


def pull_version(
    store: ObjectStore,
    version: int,
    cache: WeightCache | None,
    clock: Clock,
    *,
    names: Sequence[str] | None = None,
    check: Check = lambda: None,
    changes: Changes | None = None,
) -> tuple[Manifest, dict[str, TensorBlock]]:
    """The manifest of a weight version and its tensors, or those called `names`, every one verified.

    What `cache` holds is taken from there, and its earlier versions serve as bases of differences. The rest comes from
    the store in the way with the fewest bytes, once per machine, and is kept in the cache. Whatever the cache holds
    afterwards is returned in its mapped memory. `changes` notes the elements that differences change. `check` is called
    in this thread, at least twice a second except during a single request. Its exception ends the pull as soon as the
    ranges and tensors that were begun have ended. Raises ObjectMissing, which names the manifest, if the version is not
    published; CorruptObject.
    """
    manifest = read_manifest(store, layout.weights(version))
    wanted = manifest.tensors if names is None else {name: manifest.tensors[name] for name in names}
    found = _held(cache, wanted, {}, check)
    missing_bytes = sum(entry.num_bytes for name, entry in wanted.items() if name not in found)
    if len(found) < len(wanted):
        # A process that will not find our tensors in the cache has no reason to wait for us.
        shared = cache is not None and cache.has_room(missing_bytes)
        with cache.fetching(manifest.digest, clock, check) if cache and shared else nullcontext():
            # The process that held the lock before us may have fetched what we want.
            found = _held(cache, wanted, found, check)
            missing = [name for name in wanted if name not in found]
            if missing:
                found |= (fetched := Fetch(store, version, manifest, cache, check, changes).tensors(missing))
                if cache:
                    kept = {name: (wanted[name], block) for name, block in fetched.items()}
                    found |= cache.store(store.url, version, kept, check)
    return manifest, {name: found[name] for name in wanted}


def bases(store: ObjectStore, version: int) -> list[int]:
    """All versions whose objects a reader of `version` may need, including itself, in ascending order.

    Raises ObjectMissing if one of them is not published, or no longer.
    """
    needed: set[int] = set()
    at: int | None = version
    while at is not None:
        manifest = read_manifest(store, layout.weights(at))
        needed.add(at)
        needed.update(entry.version for entry in manifest.tensors.values() if entry.version is not None)
        at = base_of(manifest, at)
    return sorted(needed)


def _differences(
    tensors: Mapping[str, TensorBlock],
    digests: Mapping[str, str],
    before: Manifest,
    base: Mapping[str, TensorBlock],
) -> dict[str, Draft]:
    """Each tensor as its difference from `base`, if `base` is as published and the saving is enough; else whole."""

    def draft(name: str) -> Draft:
        block, old, entry = tensors[name], base.get(name), before.tensors.get(name)
        whole = Draft.full(block, digests[name])
        if old is None or entry is None or (entry.dtype, entry.shape) != (block.dtype, block.shape):
            return whole
        if old.num_bytes != block.num_bytes or digest_of(old.data) != entry.digest:
            return whole
        if np.array_equal(np.frombuffer(old.data, np.uint8), np.frombuffer(block.data, np.uint8)):
            return Draft(block, digests[name], "same")
        difference = deltas.encode(old.data, block.data, ITEM_BYTES[block.dtype])
        if len(difference) > DIFFERENCE_SHARE_MAX * block.num_bytes:
            return whole
        payload = TensorBlock("U8", (len(difference),), difference)
        return Draft(block, digests[name], DIFFERENCE, payload, digest_of(difference))

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(tensors, pool.map(draft, tensors), strict=True))


@dataclass(frozen=True)
class _Whole:
    """The last version that is stored whole, and the bytes of the differences since that version."""

    version: int
    manifest: Manifest
    chain_bytes: int


def _last_whole(store: ObjectStore, at: int, manifest: Manifest) -> _Whole:
    """The last whole version, as seen from version `at`, whose manifest is given."""
    chain_bytes = 0
    while (earlier := base_of(manifest, at)) is not None:
        chain_bytes += sum(entry.stored_bytes or 0 for entry in manifest.tensors.values())
        at, manifest = earlier, read_manifest(store, layout.weights(earlier))
    return _Whole(at, manifest, chain_bytes)


def _whole(last: _Whole, tensors: Mapping[str, TensorBlock], digests: Mapping[str, str]) -> dict[str, Draft]:
    """Each tensor whole, or as a reference to the same tensor in the last version that is stored whole."""
    drafts = {}
    for name, block in tensors.items():
        entry = last.manifest.tensors.get(name)
        drafts[name] = Draft.full(block, digests[name])
        if entry and entry.digest == digests[name]:
            place = last.version if entry.version is None else entry.version
            reference = TensorEntry(
                dtype=block.dtype, shape=block.shape, object=entry.object, digest=digests[name], version=place
            )
            drafts[name] = Draft(block, digests[name], reference=reference)
    return drafts


def _held(
    cache: WeightCache | None, wanted: Mapping[str, TensorEntry], found: dict[str, TensorBlock], check: Check
) -> dict[str, TensorBlock]:
    """`found`, and further tensors of `wanted` that the cache holds."""
    if cache is None:
        return found
    cache.refresh()
    missing = {name: entry for name, entry in wanted.items() if name not in found}
    return found | cache.find(missing, check)
