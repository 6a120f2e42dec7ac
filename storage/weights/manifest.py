"""Manifests of published sets of tensors: blocks of bytes, entries, and digests from each tensor up to the manifest.

Owns the records and their checks. Does not know how objects are laid out, read or written, nor what a version is.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from storage.digests import DIGEST_PATTERN, digest_of
from storage.records import canonical
from storage.weights.mapped import FilePosition

STRICT = ConfigDict(extra="forbid", strict=True)
PUBLISHED_AT_S = "published_at_s"  # in a manifest's metadata: the publisher's wall clock, for people
WRITE_S = "write_s"  # in a checkpoint's metadata: how long writing it took
HEADER_LENGTH_BYTES = 8
# Name of a dtype in a safetensors header -> bytes per element.
ITEM_BYTES = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
Encoding = Literal["full", "same", "diff-zstd"]
DIFFERENCE: Encoding = "diff-zstd"


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A tensor as bytes. Raises ValueError for an unknown dtype, and for a length that contradicts dtype and shape.

    Attributes:
        dtype: as safetensors spells it.
        data: C-contiguous little-endian bytes.
        place: position of the bytes in an unchanging file, if `data` is mapped from a file.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes
    place: FilePosition | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        expected = num_bytes(self.dtype, self.shape)
        if isinstance(self.data, memoryview) and not self.data.c_contiguous:
            raise ValueError("data: not contiguous; allowed: a C-contiguous buffer")
        if self.num_bytes != expected:
            raise ValueError(f"data: {self.num_bytes} bytes; {self.dtype} of shape {self.shape} takes {expected}")
        if isinstance(self.data, memoryview) and (self.data.format != "B" or self.data.ndim != 1):
            # Flat bytes, whatever array they come from; an empty view cannot be cast.
            object.__setattr__(self, "data", self.data.cast("B") if expected else memoryview(b""))

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor in a manifest, and how to get it.

    Attributes:
        object: name of the object with the encoded bytes; empty for "same".
        digest: digest of the tensor's own bytes, for every encoding.
        version: weight version whose prefix holds the object; None: the manifest's own.
        stored_bytes, stored_digest: length and digest of a delta, which is stored as U8 [stored_bytes].
    """

    __pydantic_config__ = STRICT
    dtype: str
    shape: tuple[int, ...]
    object: str = ""
    encoding: Encoding = "full"
    digest: str
    version: int | None = None
    stored_bytes: int | None = None
    stored_digest: str | None = None

    def __post_init__(self) -> None:
        num_bytes(self.dtype, self.shape)
        _check_digest("digest", self.digest)
        if (self.encoding == "same") == bool(self.object):
            raise ValueError(f"object: value {self.object!r}; allowed: empty if and only if the encoding is 'same'")
        delta = self.encoding == DIFFERENCE
        if delta != (self.stored_digest is not None) or delta != (self.stored_bytes is not None):
            raise ValueError("stored_bytes, stored_digest: needed for a delta, and for nothing else")
        if self.stored_digest is not None:
            _check_digest("stored_digest", self.stored_digest)
        if self.version is not None and (self.encoding != "full" or self.version < 0):
            raise ValueError(f"version: value {self.version}; allowed: 0 or more, with the encoding 'full'")

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return num_bytes(self.dtype, self.shape)

    @property
    def payload(self) -> tuple[str, tuple[int, ...], str]:
        """dtype, shape and digest of the bytes in the object."""
        if self.stored_bytes is not None and self.stored_digest is not None:
            return "U8", (self.stored_bytes,), self.stored_digest
        return self.dtype, self.shape, self.digest


@dataclass(frozen=True, kw_only=True)
class ObjectEntry:
    """A safetensors object of `bytes` bytes.

    `digest` covers the header (with the length before it) and the digests of the tensors in the order of their bytes: a
    checked header and checked tensors prove the object, without hashing a byte twice.
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
    """The description of a published set of tensors.

    Attributes:
        objects: entries by the name of the object, equal to its digest.
        base: weight version behind the encodings "same" and "diff-zstd"; None: every tensor is "full".
    """

    KIND: ClassVar[str] = "manifest"
    __pydantic_config__ = STRICT
    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    metadata: dict[str, Any] = field(default_factory=dict)
    base: int | None = None

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.object and tensor.version is None and tensor.object not in self.objects:
                raise ValueError(f"tensors.{name}.object: no object {tensor.object!r} in objects")
            if tensor.encoding != "full" and self.base is None:
                raise ValueError(f"tensors.{name}.encoding: value {tensor.encoding!r}; allowed without a base: 'full'")
        for name in self.objects:
            _check_digest("name of an object", name)

    @property
    def digest(self) -> str:
        """The digest of the manifest's body, as in the envelope: equal for equal manifests, and only for them."""
        return digest_of(canonical.encode(self))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors.values())


def object_digest(header: bytes, tensor_digests: Iterable[str]) -> str:
    return digest_of(b"".join([header, *(bytes.fromhex(digest) for digest in tensor_digests)]))


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; raises ValueError if the dtype is unknown or a dimension is negative."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype: value {dtype!r}; allowed: {', '.join(ITEM_BYTES)}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape: value {shape}; allowed: dimensions of 0 or more")
    return math.prod(shape) * ITEM_BYTES[dtype]


def _check_digest(what: str, digest: str) -> None:
    if not DIGEST_PATTERN.fullmatch(digest):
        raise ValueError(f"{what}: value {digest!r}; allowed: 32 hexadecimal digits")
