"""The difference between two versions of a tensor in few bytes, reversible bit for bit for any bytes and dtype.

After an optimizer step few elements of a bfloat16 tensor differ, most by one unit in the last place. The encoding keeps
the gaps between changed elements and the differences of their bits as integers, groups bytes of equal weight, and
compresses them with zstd (docs/format.md section 7). This module is pure: it knows no store and no manifest.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.stores.shortage import raise_shortage

SEGMENT = 1 << 16  # elements; gaps count from the segment's start, so that a gap always fits two bytes
CHUNK = 1 << 20  # elements handled at a time: a multiple of SEGMENT that fits a core's cache
ZSTD_LEVEL = 1
LENGTH_BYTES = 8
COUNT_BYTES = 4
GAP_BYTES = 2

Words = NDArray[np.unsignedinteger]
Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]


def encode(base: memoryview | bytes, new: memoryview | bytes, item_bytes: int) -> bytes:
    """The delta from `base` to `new`, two buffers of equal length, a multiple of `item_bytes` (1, 2, 4 or 8)."""
    before, after = _words(base, item_bytes), _words(new, item_bytes)
    counts, gaps, values = [], [], []
    for start, indices in _changed(before, after):
        old, present = before[start : start + CHUNK], after[start : start + CHUNK]
        count = np.bincount(indices // SEGMENT, minlength=-(-len(present) // SEGMENT))
        gap = np.diff(indices, prepend=-1) - 1
        firsts = (np.cumsum(count) - count)[count > 0]
        gap[firsts] = indices[firsts] % SEGMENT
        counts.append(count.astype("<u4"))
        gaps.append(gap.astype("<u2"))
        values.append(_zigzag(present[indices] - old[indices]))
    parts = [
        _joined(counts, "<u4").view(np.uint8),
        _planes(_joined(gaps, "<u2")),
        _planes(_joined(values, after.dtype)),
    ]
    raw = np.concatenate(parts)
    compressed: bytes = pa.Codec("zstd", compression_level=ZSTD_LEVEL).compress(raw.data, asbytes=True)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + compressed


def places(base: memoryview | bytes, new: memoryview | bytes, item_bytes: int) -> Indices:
    """Which elements of two buffers of equal length differ, in ascending order."""
    found = _changed(_words(base, item_bytes), _words(new, item_bytes))
    return np.concatenate([np.zeros(0, np.int64), *(indices + start for start, indices in found)])


def apply(delta: memoryview | bytes, data: memoryview, item_bytes: int, changed: list[Indices] | None = None) -> None:
    """Turn the base in `data`, in place, into the `new` that `encode` got; raises ValueError for malformed bytes.

    `changed` gets the indices of the changed elements, in ascending order. After an error `data` is undefined. The
    caller checks the result by its digest.
    """
    words = _words(data, item_bytes)
    counts, gap_planes, value_planes = _decompress(delta, len(words), item_bytes)
    done = 0
    for start in range(0, len(words), CHUNK):
        count = counts[start // SEGMENT : (start + CHUNK) // SEGMENT].astype(np.int64)
        total = int(count.sum())
        if not total:
            continue
        steps = _from_planes(gap_planes[:, done : done + total]).astype(np.int64) + 1
        ends = np.cumsum(steps)
        before = np.concatenate([[0], ends])[np.cumsum(count) - count]
        shift = np.arange(len(count)) * SEGMENT - 1 - before
        indices = ends + np.repeat(shift, count)
        chunk = words[start : start + CHUNK]
        if int(indices.max()) >= len(chunk):
            raise ValueError("a gap leads beyond the end of the tensor")
        chunk[indices] += _unzigzag(_from_planes(value_planes[:, done : done + total]))
        if changed is not None:
            changed.append(indices + start)
        done += total


def _changed(before: Words, after: Words) -> Iterator[tuple[int, Indices]]:
    """For each chunk, its first element and the indices, within the chunk, of elements that differ."""
    for start in range(0, len(after), CHUNK):
        yield start, np.flatnonzero(before[start : start + CHUNK] != after[start : start + CHUNK])


def _decompress(delta: memoryview | bytes, num_words: int, item_bytes: int) -> tuple[Words, Bytes, Bytes]:
    """(changed elements per segment, planes of gaps [2, changed], planes of zigzag differences [w, changed])."""
    num_segments = -(-num_words // SEGMENT)
    length = int.from_bytes(delta[:LENGTH_BYTES], "little")
    if length > num_segments * COUNT_BYTES + num_words * (GAP_BYTES + item_bytes):
        raise ValueError(f"{length} bytes are more than any difference of {num_words} elements has")
    try:
        raw = np.frombuffer(pa.Codec("zstd").decompress(delta[LENGTH_BYTES:], length), np.uint8)
    except (OSError, pa.ArrowInvalid) as error:
        raise_shortage(error)
        raise ValueError(f"not zstd: {error}") from None
    if len(raw) < num_segments * COUNT_BYTES:
        raise ValueError(f"{len(raw)} bytes do not hold the counts of {num_segments} segments")
    split = num_segments * COUNT_BYTES
    counts = raw[:split].view("<u4")
    total = int(counts.sum(dtype=np.int64))
    if len(raw) != split + total * (GAP_BYTES + item_bytes):
        raise ValueError(f"{len(raw)} bytes do not hold {total} differences")
    middle = split + total * GAP_BYTES
    return counts, raw[split:middle].reshape(GAP_BYTES, -1), raw[middle:].reshape(item_bytes, -1)


def _words(data: memoryview | bytes, item_bytes: int) -> Words:
    return np.frombuffer(data, f"<u{item_bytes}")


def _joined(parts: list[Words], dtype: np.dtype[np.unsignedinteger] | str) -> Words:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _planes(words: Words) -> Bytes:
    """Byte 0 of every word, byte 1 of every word, and so on: bytes of equal weight are similar."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(words), words.itemsize).T).reshape(-1)


def _from_planes(planes: Bytes) -> Words:
    return np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{len(planes)}")


def _zigzag(differences: Words) -> Words:
    """Maps 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., so that small negative differences become small numbers, too."""
    bits = differences.itemsize * 8
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (bits - 1))).view(differences.dtype)


def _unzigzag(values: Words) -> Words:
    one = values.dtype.type(1)
    return (values >> one) ^ (~(values & one) + one)
