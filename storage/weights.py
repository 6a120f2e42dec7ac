"""Sets of tensors in object storage: safetensors objects named by their content, and a manifest written last.

Who finds a manifest finds everything it names; whoever is killed before leaves objects that nobody reads. Bytes are
verified before they are handed out. Knows dtypes by name only: what a tensor means, and tied tensors, are the
caller's business.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import ConfigDict

from storage import layout, records
from storage.store import ConflictingRecord, CorruptObject, ObjectMissing, ObjectStore, commit

STRICT = ConfigDict(extra="forbid", strict=True)
RANGE_BYTES = 8 << 20
# Below 100 MiB, from where s3fs writes in parts, which it leaves behind when a deadline cuts it off.
OBJECT_BYTES_MAX = 64 << 20
PUBLISHED_AT_S = "published_at_s"  # in a manifest's metadata: when, on the publisher's wall clock, for people
THREADS = 8
HEADER_LENGTH_BYTES = 8
ALIGNMENT_BYTES = 8
DIGEST_PATTERN = re.compile(r"[0-9a-f]{32}")
# Name of a dtype in a safetensors header -> bytes per element.
ITEM_BYTES = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A tensor as bytes: dtype as safetensors spells it, shape, and C-contiguous little-endian data.

    Raises ValueError when the dtype is unknown or the data is not as long as dtype and shape say.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes

    def __post_init__(self) -> None:
        expected = num_bytes(self.dtype, self.shape)
        if isinstance(self.data, memoryview) and not self.data.c_contiguous:
            raise ValueError("data: not contiguous; allowed: a C-contiguous buffer")
        if self.num_bytes != expected:
            raise ValueError(f"data: {self.num_bytes} bytes; {self.dtype} of shape {self.shape} takes {expected}")

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where a tensor is. `digest` is the BLAKE2b-128 of its bytes, in hexadecimal."""

    __pydantic_config__ = STRICT
    dtype: str
    shape: tuple[int, ...]
    object: str
    encoding: Literal["full"] = "full"
    digest: str

    def __post_init__(self) -> None:
        num_bytes(self.dtype, self.shape)
        _check_digest("digest", self.digest)


@dataclass(frozen=True, kw_only=True)
class ObjectEntry:
    """A safetensors object of `bytes` bytes.

    `digest` is the BLAKE2b-128 of its header (with the length before it) followed by the digests of its tensors in the
    order of their bytes: who has checked every tensor and the header has checked the object, and hashed no byte twice.
    """

    __pydantic_config__ = STRICT
    bytes: int
    digest: str

    def __post_init__(self) -> None:
        _check_digest("digest", self.digest)
        if self.bytes <= HEADER_LENGTH_BYTES:
            raise ValueError(f"bytes: value {self.bytes}; allowed: more than {HEADER_LENGTH_BYTES}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a published set of tensors consists of. `objects` is keyed by the object's name, which is its digest.

    `base` is reserved for sets that are stored as differences to an earlier version. `digest` is the BLAKE2b-128 of
    this record's canonical JSON with `digest` empty.
    """

    __pydantic_config__ = STRICT
    format: Literal[1] = 1
    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    metadata: dict[str, Any] = field(default_factory=dict)
    base: int | None = None
    digest: str = ""

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.object not in self.objects:
                raise ValueError(f"tensors.{name}.object: no object {tensor.object!r} in objects")
        for name in self.objects:
            _check_digest("name of an object", name)


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; raises ValueError when the dtype is unknown or a dimension negative."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype: value {dtype!r}; allowed: {', '.join(ITEM_BYTES)}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape: value {shape}; allowed: dimensions of 0 or more")
    return math.prod(shape) * ITEM_BYTES[dtype]


def publish(
    store: ObjectStore,
    prefix: str,
    tensors: Mapping[str, TensorBlock],
    metadata: Mapping[str, Any],
    object_bytes_max: int = OBJECT_BYTES_MAX,
) -> Manifest:
    """Write `tensors` and then the manifest under `prefix`; returns the manifest that is stored.

    An object holds at most `object_bytes_max` bytes of tensors, or a single larger one. Publishing the same tensors
    again returns what was published first, with its metadata. Raises ConflictingRecord when other tensors are published
    under `prefix`, ValueError when a name or the metadata cannot be stored.
    """
    manifest, headers = _describe(tensors, metadata, object_bytes_max)
    key = layout.manifest(prefix)
    with suppress(ObjectMissing):
        return _same_tensors(read_manifest(store, prefix), manifest, f"{store.url}/{key}")
    for digest, (header, names) in headers.items():
        object_key = layout.tensor_object(prefix, digest)
        if not commit(store, object_key, b"".join([header, *(tensors[name].data for name in names)])):
            raise CorruptObject(object_key, "it holds other bytes than its name says")
    if commit(store, key, records.encode(manifest)):
        return manifest
    return _same_tensors(read_manifest(store, prefix), manifest, f"{store.url}/{key}")


def read_manifest(store: ObjectStore, prefix: str) -> Manifest:
    """The manifest under `prefix`; raises ObjectMissing when nothing is published (yet), or CorruptObject."""
    key = layout.manifest(prefix)
    manifest = records.read(store, Manifest, key)
    if _manifest_digest(manifest) != manifest.digest:
        raise CorruptObject(key, f"digest: its content does not have the digest {manifest.digest!r} it states")
    return manifest


def pull(
    store: ObjectStore, prefix: str, names: Collection[str] | None = None
) -> tuple[Manifest, dict[str, TensorBlock]]:
    """The manifest and the tensors `names` (all of them by default), every byte verified.

    Objects are read in parallel ranges into one buffer each, which the blocks share; memory is that of the objects
    read. Raises ObjectMissing when nothing is published, CorruptObject naming the object and tensor, ValueError for
    names that are not in the manifest.
    """
    manifest = read_manifest(store, prefix)
    wanted = list(manifest.tensors) if names is None else list(dict.fromkeys(names))
    unknown = [name for name in wanted if name not in manifest.tensors]
    if unknown:
        raise ValueError(f"tensor names: {unknown[:3]} are not among the {len(manifest.tensors)} under {prefix!r}")
    by_object: dict[str, list[str]] = {}
    for name in wanted:
        by_object.setdefault(manifest.tensors[name].object, []).append(name)
    readers, checkers = ThreadPoolExecutor(THREADS), ThreadPoolExecutor(THREADS)
    try:
        keys = {name: layout.tensor_object(prefix, name) for name in by_object}
        reads = {name: _start_reading(readers, store, keys[name], manifest.objects[name].bytes) for name in by_object}
        checks: dict[str, Future[TensorBlock]] = {}
        for object_name, (buffer, parts) in reads.items():
            for part in parts:
                part.result()
            spans = _check_header(keys[object_name], buffer, object_name, manifest)
            for name in by_object[object_name]:
                data = memoryview(buffer)[slice(*spans[name])]
                checks[name] = checkers.submit(_check_tensor, keys[object_name], name, manifest.tensors[name], data)
        return manifest, {name: checks[name].result() for name in wanted}
    finally:
        readers.shutdown(cancel_futures=True)
        checkers.shutdown(cancel_futures=True)


def _describe(
    tensors: Mapping[str, TensorBlock], metadata: Mapping[str, Any], object_bytes_max: int
) -> tuple[Manifest, dict[str, tuple[bytes, list[str]]]]:
    """The manifest of `tensors`, and by object name the header and the tensors in the order of their bytes."""
    if "__metadata__" in tensors:
        raise ValueError("tensor name: value '__metadata__'; allowed: any other, safetensors keeps this one for itself")
    digests = _digest_all(tensors)
    headers: dict[str, tuple[bytes, list[str]]] = {}
    objects: dict[str, ObjectEntry] = {}
    places: dict[str, str] = {}
    for names in _split(tensors, object_bytes_max):
        header = _encode_header(names, tensors)
        digest = _object_digest(header, (digests[name] for name in names))
        headers[digest] = (header, names)
        objects[digest] = ObjectEntry(bytes=len(header) + sum(tensors[name].num_bytes for name in names), digest=digest)
        places.update(dict.fromkeys(names, digest))
    entries = {
        name: TensorEntry(dtype=block.dtype, shape=block.shape, object=places[name], digest=digests[name])
        for name, block in tensors.items()
    }
    manifest = Manifest(tensors=entries, objects=objects, metadata=_as_json(metadata))
    return replace(manifest, digest=_manifest_digest(manifest)), headers


def _split(tensors: Mapping[str, TensorBlock], object_bytes_max: int) -> Iterator[list[str]]:
    """Names of the tensors of each object, in the order of their bytes in it."""
    if object_bytes_max < 1:
        raise ValueError(f"object_bytes_max: value {object_bytes_max}; allowed: 1 or more")
    group: list[str] = []
    total = 0
    for name, block in tensors.items():
        if group and total + block.num_bytes > object_bytes_max:
            yield _in_file_order(group, tensors)
            group, total = [], 0
        group.append(name)
        total += block.num_bytes
    if group:
        yield _in_file_order(group, tensors)


def _in_file_order(names: list[str], tensors: Mapping[str, TensorBlock]) -> list[str]:
    # Wide elements first, so that every tensor lies at a multiple of its element size.
    return sorted(names, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))


def _encode_header(names: Iterable[str], tensors: Mapping[str, TensorBlock]) -> bytes:
    """A safetensors header: length of the JSON as 8 little-endian bytes, then the JSON, padded with spaces.

    Written here because the name of an object depends on every byte of it, and must not on a library's version.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        block = tensors[name]
        start, end = end, end + block.num_bytes
        fields[name] = {"dtype": block.dtype, "shape": list(block.shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text


def _start_reading(
    readers: ThreadPoolExecutor, store: ObjectStore, key: str, size: int
) -> tuple[bytearray, list[Future[None]]]:
    """A buffer of `size` bytes and the reads that fill it."""
    buffer = bytearray(size)
    view = memoryview(buffer)

    def read(start: int) -> None:
        end = min(start + RANGE_BYTES, size)
        # One byte more than there should be, to notice an object that is too long.
        part = store.get(key, start, end + 1 if end == size else end)
        if len(part) != end - start:
            raise CorruptObject(key, f"not {size} bytes long, as the manifest says")
        view[start:end] = part

    return buffer, [readers.submit(read, start) for start in range(0, size, RANGE_BYTES)]


def _check_header(key: str, buffer: bytearray, object_name: str, manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes lie in `buffer`; raises CorruptObject unless the header is the published one."""
    data_start = HEADER_LENGTH_BYTES + int.from_bytes(buffer[:HEADER_LENGTH_BYTES], "little")
    try:
        fields = json.loads(buffer[HEADER_LENGTH_BYTES:data_start])
        fields.pop("__metadata__", None)
        spans = {name: (data_start + start, data_start + end) for name, start, end in _offsets(fields)}
        expected = manifest.objects[object_name].digest
        digests = [manifest.tensors[name].digest for name in sorted(spans, key=spans.__getitem__)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptObject(key, "its header cannot be read") from None
    present = {name for name, entry in manifest.tensors.items() if entry.object == object_name}
    if spans.keys() != present or _object_digest(buffer[:data_start], digests) != expected:
        raise CorruptObject(key, f"its header and tensors do not have the digest {expected}")
    return spans


def _offsets(fields: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    for name, entry in fields.items():
        start, end = entry["data_offsets"]
        yield name, start, end


def _check_tensor(key: str, name: str, entry: TensorEntry, data: memoryview) -> TensorBlock:
    if _digest(data) != entry.digest:
        raise CorruptObject(key, f"tensor {name!r} does not have the digest {entry.digest}")
    try:
        return TensorBlock(entry.dtype, entry.shape, data)
    except ValueError as error:
        raise CorruptObject(key, f"tensor {name!r}: {error}") from None


def _same_tensors(stored: Manifest, ours: Manifest, where: str) -> Manifest:
    """`stored`, if it describes the tensors of `ours`."""
    names = [*stored.tensors, *(name for name in ours.tensors if name not in stored.tensors)]
    for name in names:
        pair = [manifest.tensors.get(name) for manifest in (stored, ours)]
        if len({entry and (entry.dtype, entry.shape, entry.digest) for entry in pair}) > 1:
            raise ConflictingRecord(
                f"{where}: other tensors are already published there; the first to differ is {name!r}"
            )
    return stored


def _as_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`metadata` as it will be read back; raises ValueError when JSON cannot hold it."""
    try:
        stored: dict[str, Any] = json.loads(json.dumps(dict(metadata), ensure_ascii=False).encode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata: {error}; allowed: what JSON can hold") from None
    return stored


def _digest_all(tensors: Mapping[str, TensorBlock]) -> dict[str, str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(tensors, pool.map(_digest, (block.data for block in tensors.values())), strict=True))


def _digest(data: memoryview | bytes | bytearray) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _object_digest(header: bytes | bytearray, tensor_digests: Iterable[str]) -> str:
    return _digest(b"".join([header, *(bytes.fromhex(digest) for digest in tensor_digests)]))


def _manifest_digest(manifest: Manifest) -> str:
    return _digest(records.encode(replace(manifest, digest="")))


def _check_digest(what: str, digest: str) -> None:
    if not DIGEST_PATTERN.fullmatch(digest):
        raise ValueError(f"{what}: value {digest!r}; allowed: 32 hexadecimal digits")
