"""Safetensors objects in Gleaner's layout: encodes their headers, and reads many of them at once, verified.

The header follows from the manifest alone, so a reader knows where every tensor lies before it reads a byte. Ranges are
read in parallel, straight into their place, and hashed as they arrive. Does not know the meaning of tensors.
"""

import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from storage.digests import Hasher
from storage.stores.store import CorruptObject, ObjectStore, read_into
from storage.threads import Check, in_threads
from storage.weights.manifest import (
    HEADER_LENGTH_BYTES,
    ITEM_BYTES,
    Manifest,
    TensorBlock,
    num_bytes,
    object_digest,
)

RANGE_BYTES = 8 << 20
THREADS = 8
# Of an ObjectStream: enough ranges for all threads, and little beside what is read into.
WINDOW_BYTES = 128 << 20
ALIGNMENT_BYTES = 8
Described = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype and shape, as stored in the object


def in_file_order(described: Described) -> list[str]:
    """Names in the order of their bytes: wide elements first, for alignment of each tensor to its element size."""
    return sorted(described, key=lambda name: (-ITEM_BYTES[described[name][0]], name))


def encode_header(described: Described) -> bytes:
    """A safetensors header: length of the JSON as 8 little-endian bytes, then the JSON, padded with spaces.

    Gleaner writes it itself because an object's name depends on every byte, and must not depend on a library's version.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in in_file_order(described):
        dtype, shape = described[name]
        start, end = end, end + num_bytes(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text


@dataclass(frozen=True)
class Piece:
    """A tensor's stored bytes within an object."""

    name: str
    start: int
    end: int
    block: tuple[str, tuple[int, ...]]
    digest: str


@dataclass(frozen=True)
class ObjectLayout:
    """The places of the tensors in an object; `header` is the object's expected beginning."""

    key: str
    header: bytes
    pieces: tuple[Piece, ...]
    manifest: Manifest

    @property
    def num_bytes(self) -> int:
        return self.pieces[-1].end if self.pieces else len(self.header)


def layouts(manifest: Manifest, manifest_key: str, prefix: str, wanted: Iterable[str]) -> list[ObjectLayout]:
    """The objects below `prefix` that hold the tensors `wanted`.

    Raises CorruptObject, which names the manifest, if header and tensors of an object contradict the stated digest or
    length.
    """
    names = dict.fromkeys(manifest.tensors[name].object for name in wanted)
    held: dict[str, list[str]] = {name: [] for name in names}
    for name, entry in manifest.tensors.items():
        if entry.object in held and entry.version is None:
            held[entry.object].append(name)
    return [_layout(manifest, manifest_key, f"{prefix}{name}.safetensors", name, held[name]) for name in names]


def _layout(manifest: Manifest, manifest_key: str, key: str, object_name: str, names: list[str]) -> ObjectLayout:
    described = {name: manifest.tensors[name].payload[:2] for name in names}
    header = encode_header(described)
    pieces = []
    end = len(header)
    for name in in_file_order(described):
        dtype, shape, digest = manifest.tensors[name].payload
        start, end = end, end + num_bytes(dtype, shape)
        pieces.append(Piece(name, start, end, (dtype, shape), digest))
    stated = manifest.objects[object_name]
    found = object_digest(header, (piece.digest for piece in pieces))
    if (found, end) != (stated.digest, stated.bytes):
        reason = f"object {object_name!r}: header and tensors do not have the digest and length it states"
        raise CorruptObject(manifest_key, reason)
    return ObjectLayout(key, header, tuple(pieces), manifest)


def read_pieces(
    store: ObjectStore, wanted: Iterable[tuple[ObjectLayout, set[str]]], check: Check = lambda: None
) -> dict[tuple[str, str], TensorBlock]:
    """The named tensors of each object, by (object key, name), every byte verified.

    The blocks of adjacent tensors with equal encoding share a buffer. `check` is called between ranges. Raises what
    `check` raises, ObjectMissing, or CorruptObject, which names the object and the tensor.
    """
    runs = [run for layout, names in wanted for run in _runs(layout, names)]
    # The threads begin with different runs: a range is then hashed right after it was read, while it is in the cache.
    order = sorted(
        (number // THREADS, start, number)
        for number, run in enumerate(runs)
        for start in range(run.start, run.end, RANGE_BYTES)
    )
    in_threads(THREADS, lambda part: runs[part[2]].read(store, part[1]), order, check)
    return {(run.layout.key, piece.name): run.block(piece) for run in runs for piece in run.pieces}


class ObjectStream:
    """Iterates over objects, each as its wanted tensors by name, every byte verified; reads ahead in threads.

    What was read and not yet handed out takes at most `window_bytes`, or a single larger object. The iteration raises
    the errors of `read_pieces` at the object concerned, and ends.
    """

    def __init__(
        self, store: ObjectStore, wanted: Sequence[tuple[ObjectLayout, set[str]]], window_bytes: int = WINDOW_BYTES
    ) -> None:
        """Begin to read."""
        self._store = store
        self._wanted = deque(wanted)
        self._window_bytes = window_bytes
        self._held_bytes = 0
        self._ahead: deque[tuple[int, list[_Run], list[Future[None]]]] = deque()
        self._pool = ThreadPoolExecutor(THREADS, "tensors")
        self._fill()

    def __iter__(self) -> "ObjectStream":
        return self

    def __next__(self) -> dict[str, TensorBlock]:
        if not self._ahead:
            self._pool.shutdown()
            raise StopIteration
        num_bytes, runs, parts = self._ahead.popleft()
        try:
            for part in parts:
                part.result()
        except BaseException:
            self._wanted.clear()
            self._ahead.clear()
            self._pool.shutdown(cancel_futures=True)
            raise
        self._held_bytes -= num_bytes
        self._fill()
        return {piece.name: run.block(piece) for run in runs for piece in run.pieces}

    def _fill(self) -> None:
        while self._wanted and (not self._ahead or self._held_bytes + self._next_bytes() <= self._window_bytes):
            num_bytes, (layout, names) = self._next_bytes(), self._wanted.popleft()
            runs = list(_runs(layout, names))
            starts = [(run, start) for run in runs for start in range(run.start, run.end, RANGE_BYTES)]
            self._ahead.append(
                (num_bytes, runs, [self._pool.submit(run.read, self._store, start) for run, start in starts])
            )
            self._held_bytes += num_bytes

    def _next_bytes(self) -> int:
        return self._wanted[0][0].num_bytes


def _runs(layout: ObjectLayout, names: set[str]) -> Iterator["_Run"]:
    """Groups of adjacent wanted pieces; the first reads the header, too, the last checks for surplus bytes.

    A difference is needed only for a moment, so it must not share the memory of a tensor that stays.
    """
    tensors = layout.manifest.tensors
    for kind, pieces in groupby(layout.pieces, lambda piece: piece.name in names and tensors[piece.name].encoding):
        if kind:
            yield _Run(layout, list(pieces))


class _Run:
    """Adjacent tensors of an object: a buffer to read into, and the hashing behind the reading."""

    def __init__(self, layout: ObjectLayout, pieces: list[Piece]) -> None:
        self.layout = layout
        self.pieces = pieces
        self.start = 0 if pieces[0] is layout.pieces[0] else pieces[0].start
        self.end = pieces[-1].end
        # numpy, not a bytearray: it asks for huge pages, which makes filling the buffer several times faster.
        self._buffer = np.empty(self.end - self.start + 1, np.uint8).data
        self._lock = threading.Lock()
        self._arrived: set[int] = set()
        self._hashed = self.start
        self._hashing = False
        self._open = list(reversed(pieces))
        self._hasher = Hasher()

    def block(self, piece: Piece) -> TensorBlock:
        return TensorBlock(*piece.block, self._view(piece.start, piece.end))

    def read(self, store: ObjectStore, start: int) -> None:
        """Fill one range, then hash the complete ranges in order, in a single thread at a time."""
        end = min(start + RANGE_BYTES, self.end)
        # One byte more than expected, to notice an object that is too long.
        more = end == self.layout.num_bytes
        length = read_into(store, self.layout.key, start, self._view(start, end + more))
        if length != end - start:
            raise CorruptObject(self.layout.key, f"not {self.layout.num_bytes} bytes long, as the manifest says")
        with self._lock:
            self._arrived.add(start)
            if self._hashing:
                return
            self._hashing = True
        while True:
            with self._lock:
                begin = self._hashed
                if begin not in self._arrived:
                    self._hashing = False
                    return
                self._hashed = min(begin + RANGE_BYTES, self.end)
            self._hash(begin, min(begin + RANGE_BYTES, self.end))

    def _hash(self, start: int, end: int) -> None:
        head = len(self.layout.header)
        if start < head and self._view(start, min(end, head)) != self.layout.header[start:end]:
            raise CorruptObject(self.layout.key, "its header does not match its digest")
        while self._open and self._open[-1].start < end:
            piece = self._open[-1]
            self._hasher.update(self._view(max(start, piece.start), min(end, piece.end)))
            if piece.end > end:
                return
            self._close(self._open.pop())

    def _close(self, piece: Piece) -> None:
        if self._hasher.hexdigest() != piece.digest:
            reason = f"tensor {piece.name!r} does not have the digest {piece.digest}"
            raise CorruptObject(self.layout.key, reason)
        self._hasher = Hasher()

    def _view(self, start: int, end: int) -> memoryview:
        return self._buffer[start - self.start : end - self.start]
