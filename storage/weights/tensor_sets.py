"""Sets of tensors in object storage: safetensors objects named by their content, and a manifest written last.

A reader that finds a manifest finds every object in the manifest. A writer killed before the manifest leaves objects
that no one reads. Bytes are verified before they are handed out. This module knows dtypes by name only: the meaning of
tensors, and tied tensors, are the caller's business. storage/weights/versions.py knows how a version follows from an
earlier version.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from storage.digests import digest_of
from storage.records import layout, records
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing, ObjectStore, commit
from storage.threads import in_threads
from storage.weights.manifest import (
    DIFFERENCE,
    ITEM_BYTES,
    PUBLISHED_AT_S,
    WRITE_S,
    Encoding,
    Manifest,
    ObjectEntry,
    TensorBlock,
    TensorEntry,
    object_digest,
)
from storage.weights.objects import (
    RANGE_BYTES,
    THREADS,
    WINDOW_BYTES,
    ObjectLayout,
    ObjectStream,
    encode_header,
    in_file_order,
    layouts,
    read_pieces,
)

__all__ = ["ITEM_BYTES", "PUBLISHED_AT_S", "RANGE_BYTES", "WRITE_S", "Manifest", "TensorBlock", "TensorEntry"]
# Below 100 MiB: above that s3fs writes in parts, and leaves them behind when a deadline cuts it off.
OBJECT_BYTES_MAX = 64 << 20
UPLOADS = 4  # objects at a time; each is copied in memory
_Content = tuple[str, tuple[int, ...], str]  # dtype, shape, digest


@dataclass(frozen=True)
class Draft:
    """A tensor to be published.

    Attributes:
        payload, payload_digest: bytes to store, if any, and their digest.
        reference: entry of a tensor that is stored already and only has to be named.
    """

    block: TensorBlock
    digest: str
    encoding: Encoding = "full"
    payload: TensorBlock | None = None
    payload_digest: str = ""
    reference: TensorEntry | None = None

    @classmethod
    def full(cls, block: TensorBlock, digest: str) -> "Draft":
        """A draft that stores the tensor whole."""
        return cls(block, digest, "full", block, digest)

    def entry(self, object_name: str) -> TensorEntry:
        """The tensor's entry in the manifest; `object_name` holds the payload."""
        if self.reference is not None:
            return self.reference
        difference = self.payload if self.encoding == DIFFERENCE else None
        return TensorEntry(
            dtype=self.block.dtype,
            shape=self.block.shape,
            object=object_name,
            encoding=self.encoding,
            digest=self.digest,
            stored_bytes=difference.num_bytes if difference else None,
            stored_digest=self.payload_digest if difference else None,
        )


@dataclass(frozen=True)
class DraftedSet:
    """A manifest, and the objects to store before the manifest: header and blocks of each, by name."""

    manifest: Manifest
    objects: dict[str, tuple[bytes, list[TensorBlock]]]

    def write(self, store: ObjectStore, prefix: str, key: str) -> bool:
        """Store the objects below `prefix`, then the manifest under `key`; False if another manifest exists.

        This takes the memory of UPLOADS objects.
        """
        self.write_objects(store, prefix)
        return records.commit(store, key, self.manifest)

    def write_objects(self, store: ObjectStore, prefix: str) -> None:
        """Store the objects below `prefix`; readers ignore them until a manifest names them."""

        def upload(name: str) -> None:
            header, blocks = self.objects[name]
            object_key = layout.tensor_object(prefix, name)
            if not commit(store, object_key, b"".join([header, *(block.data for block in blocks)])):
                raise CorruptObject(object_key, "it holds other bytes than its name says")

        in_threads(UPLOADS, upload, self.objects)


def publish(
    store: ObjectStore,
    prefix: str,
    tensors: Mapping[str, TensorBlock],
    metadata: Mapping[str, Any],
    object_bytes_max: int = OBJECT_BYTES_MAX,
) -> Manifest:
    """Write `tensors` and then the manifest under `prefix`; returns the manifest that is stored.

    An object holds at most `object_bytes_max` bytes of tensors, or a single larger tensor. Publishing equal tensors
    again returns the first manifest, with the first metadata. Raises ConflictingRecord if other tensors are published
    under `prefix`, ValueError if a name or the metadata cannot be stored.
    """
    digests = digest_all(tensors)
    full = {name: Draft.full(block, digests[name]) for name, block in tensors.items()}
    drafted = draft_set(full, metadata, object_bytes_max=object_bytes_max)
    with suppress(ObjectMissing):
        return same_tensors(store, prefix, tensors, digests)
    if drafted.write(store, prefix, layout.manifest(prefix)):
        return drafted.manifest
    return same_tensors(store, prefix, tensors, digests)


def objects_of(sizes: Mapping[str, int], object_bytes_max: int = OBJECT_BYTES_MAX) -> list[list[str]]:
    """The names of the tensors in each object that `publish` would make from tensors of these `sizes` in bytes."""
    return list(_split(sizes, object_bytes_max))


def write_object(
    store: ObjectStore, prefix: str, tensors: Mapping[str, TensorBlock], *, upload: bool = True
) -> Manifest:
    """Store one object below `prefix`; returns the part of a manifest that names it, for `write_manifest`.

    With `upload` False the object is only described. Raises CorruptObject if the stored object has other bytes.
    """
    digests = digest_all(tensors)
    full = {name: Draft.full(block, digests[name]) for name, block in tensors.items()}
    drafted = draft_set(full, {}, object_bytes_max=max(1, sum(block.num_bytes for block in tensors.values())))
    if upload:
        drafted.write_objects(store, prefix)
    return drafted.manifest


def write_manifest(store: ObjectStore, prefix: str, parts: Iterable[Manifest], metadata: Mapping[str, Any]) -> Manifest:
    """Publish objects that `write_object` stored, in the order of `parts`; returns the manifest that is stored.

    The manifest equals the manifest of `publish` for equal tensors in equal order. Raises the errors of `publish`.
    """
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for part in parts:
        tensors |= part.tensors
        objects |= part.objects
    manifest = Manifest(tensors=tensors, objects=objects, metadata=_as_json(metadata), base=None)
    if records.commit(store, layout.manifest(prefix), manifest):
        return manifest
    stored = read_manifest(store, prefix)
    _check_same(store, prefix, stored, _contents(tensors))
    return stored


def copy_set(source: ObjectStore, manifest: Manifest, place: str, store: ObjectStore, prefix: str) -> Manifest:
    """Copy tensors that lie whole below `place` of another store; returns the manifest that is stored.

    `manifest` names the tensors, with the metadata of the copy. UPLOADS objects are in memory at a time, and every byte
    is verified. Copying again changes nothing. Raises what `pull_some` and `write_manifest` raise.
    """

    def copy(names: Sequence[str]) -> Manifest:
        return write_object(store, prefix, pull_some(source, place, manifest, names))

    parts = in_threads(UPLOADS, copy, names_by_object(manifest))
    return write_manifest(store, prefix, parts, manifest.metadata)


def with_metadata(manifest: Manifest, more: Mapping[str, Any]) -> Manifest:
    """The manifest of the same tensors with `more` metadata."""
    return replace(manifest, metadata={**manifest.metadata, **_as_json(more)})


def read_manifest(store: ObjectStore, prefix: str) -> Manifest:
    """The manifest under `prefix`; raises ObjectMissing if nothing is published (yet), or CorruptObject."""
    return records.read(store, Manifest, layout.manifest(prefix))


def published_bytes(store: ObjectStore, prefix: str) -> int:
    """Bytes of all tensors under `prefix`; 0 if nothing is published there, or no longer."""
    try:
        return read_manifest(store, prefix).num_bytes
    except ObjectMissing:
        return 0


def pull(store: ObjectStore, prefix: str) -> tuple[Manifest, dict[str, TensorBlock]]:
    """The manifest and its tensors, every byte verified.

    Raises ObjectMissing if nothing is published, CorruptObject, which names the object and tensor, and ValueError for
    tensors that are not stored whole (storage.weights.versions.pull_version reads them).
    """
    manifest = read_manifest(store, prefix)
    return manifest, pull_some(store, prefix, manifest, list(manifest.tensors))


def pull_some(store: ObjectStore, prefix: str, manifest: Manifest, names: Sequence[str]) -> dict[str, TensorBlock]:
    """Some tensors of the manifest below `prefix`, every byte verified; raises what `pull` raises."""
    found, wanted = _layouts(prefix, manifest, names), {name: manifest.tensors[name] for name in names}
    blocks = read_pieces(store, [(each, set(names)) for each in found])
    places = {name: layout.tensor_object(prefix, entry.object) for name, entry in wanted.items()}
    return {name: blocks[places[name], name] for name in names}


def names_by_object(manifest: Manifest) -> list[list[str]]:
    """The names of a manifest, whose tensors are stored whole: those of each object, in their order."""
    found: dict[str, list[str]] = {}
    for name, entry in manifest.tensors.items():
        found.setdefault(entry.object, []).append(name)
    return list(found.values())


def stream(
    store: ObjectStore,
    prefix: str,
    manifest: Manifest,
    objects: Sequence[Sequence[str]],
    window_bytes: int = WINDOW_BYTES,
) -> ObjectStream:
    """The tensors of some `names_by_object`, object by object, read ahead; raises ValueError as `pull`, at once."""
    found = _layouts(prefix, manifest, [name for names in objects for name in names])
    return ObjectStream(store, [(each, set(names)) for each, names in zip(found, objects, strict=True)], window_bytes)


def _layouts(prefix: str, manifest: Manifest, names: Sequence[str]) -> list[ObjectLayout]:
    for name in names:
        entry = manifest.tensors[name]
        if entry.encoding != "full" or entry.version is not None:
            raise ValueError(f"{prefix!r} holds {name!r} as a difference to another version; use pull_version")
    return layouts(manifest, layout.manifest(prefix), prefix, names)


def draft_set(
    drafts: Mapping[str, Draft],
    metadata: Mapping[str, Any],
    *,
    base: int | None = None,
    object_bytes_max: int = OBJECT_BYTES_MAX,
) -> DraftedSet:
    """The manifest of `drafts` and its objects; raises ValueError if a name or the metadata cannot be stored."""
    if "__metadata__" in drafts:
        raise ValueError("tensor name: value '__metadata__'; allowed: any other, safetensors keeps this one for itself")
    payloads = {name: draft.payload for name, draft in drafts.items() if draft.payload is not None}
    objects: dict[str, tuple[bytes, list[TensorBlock]]] = {}
    sizes: dict[str, ObjectEntry] = {}
    places: dict[str, str] = {}
    for names in _split({name: block.num_bytes for name, block in payloads.items()}, object_bytes_max):
        described = {name: (payloads[name].dtype, payloads[name].shape) for name in names}
        header, ordered = encode_header(described), in_file_order(described)
        digest = object_digest(header, (drafts[name].payload_digest for name in ordered))
        objects[digest] = (header, [payloads[name] for name in ordered])
        sizes[digest] = ObjectEntry(bytes=len(header) + sum(payloads[n].num_bytes for n in names), digest=digest)
        places.update(dict.fromkeys(names, digest))
    manifest = Manifest(
        tensors={name: draft.entry(places.get(name, "")) for name, draft in drafts.items()},
        objects=sizes,
        metadata=_as_json(metadata),
        base=base,
    )
    return DraftedSet(manifest, objects)


def digest_all(tensors: Mapping[str, TensorBlock]) -> dict[str, str]:
    """Digests by name, computed in parallel."""
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda block: digest_of(block.data), tensors.values())
        return dict(zip(tensors, digests, strict=True))


def same_tensors(
    store: ObjectStore, prefix: str, tensors: Mapping[str, TensorBlock], digests: Mapping[str, str]
) -> Manifest:
    """The manifest that is stored below `prefix`, if it describes `tensors`, whose digests are `digests`.

    Raises ObjectMissing without a manifest, ConflictingRecord for a manifest of different tensors.
    """
    stored = read_manifest(store, prefix)
    ours = {name: (block.dtype, block.shape, digests[name]) for name, block in tensors.items()}
    _check_same(store, prefix, stored, ours)
    return stored


def _contents(tensors: Mapping[str, TensorEntry]) -> dict[str, _Content]:
    return {name: (entry.dtype, entry.shape, entry.digest) for name, entry in tensors.items()}


def _check_same(store: ObjectStore, prefix: str, stored: Manifest, ours: Mapping[str, _Content]) -> None:
    theirs = _contents(stored.tensors)
    for name in [*theirs, *ours]:
        if ours.get(name) != theirs.get(name):
            where = f"{store.url}/{layout.manifest(prefix)}"
            raise ConflictingRecord(
                f"{where}: other tensors are already published there; the first to differ is {name!r}"
            )


def _split(sizes: Mapping[str, int], object_bytes_max: int) -> Iterator[list[str]]:
    """The names of each object's tensors."""
    if object_bytes_max < 1:
        raise ValueError(f"object_bytes_max: value {object_bytes_max}; allowed: 1 or more")
    group: list[str] = []
    total = 0
    for name, num_bytes in sizes.items():
        if group and total + num_bytes > object_bytes_max:
            yield group
            group, total = [], 0
        group.append(name)
        total += num_bytes
    if group:
        yield group


def _as_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`metadata` as it will be read back; raises ValueError if JSON cannot hold it."""
    try:
        stored: dict[str, Any] = json.loads(json.dumps(dict(metadata), ensure_ascii=False).encode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata: {error}; allowed: what JSON can hold") from None
    return stored
