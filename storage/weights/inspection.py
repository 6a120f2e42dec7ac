"""Checks with few reads that a published set of tensors is stored whole, before work that depends on the set."""

from storage.records import layout
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from storage.threads import in_threads
from storage.weights.objects import THREADS, ObjectLayout, layouts, read_pieces
from storage.weights.tensor_sets import read_manifest

# Up to this size the bytes themselves are read and compared with their digests.
VERIFIED_BYTES_MAX = 64 << 20


def inspect_set(store: ObjectStore, prefix: str) -> None:
    """Check the set of tensors below `prefix`: the manifest, and the length of each stored object.

    A set of at most VERIFIED_BYTES_MAX bytes is read and verified. Raises ObjectMissing if the manifest is missing, and
    CorruptObject, which names the object.
    """
    manifest = read_manifest(store, prefix)
    stored = [name for name, entry in manifest.tensors.items() if entry.object and entry.version is None]
    found = layouts(manifest, layout.manifest(prefix), prefix, stored)
    in_threads(THREADS, lambda each: _check_length(store, each), found)
    if sum(each.num_bytes for each in found) <= VERIFIED_BYTES_MAX:
        read_pieces(store, [(each, set(stored)) for each in found])


def _check_length(store: ObjectStore, stated: ObjectLayout) -> None:
    """Read the last byte, and a further byte that must be missing."""
    try:
        end = store.get(stated.key, stated.num_bytes - 1, stated.num_bytes + 1)
    except ObjectMissing:
        raise CorruptObject(stated.key, "it is missing, and its manifest names it") from None
    if len(end) != 1:
        raise CorruptObject(stated.key, f"not {stated.num_bytes} bytes long, as the manifest says")
