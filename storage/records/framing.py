"""Arrow objects: one IPC stream with compressed buffers, and a trailer of 24 bytes (docs/format.md section 4).

The trailer is a magic number and a digest of all bytes before it. It follows the Arrow end-of-stream mark, where any
Arrow reader stops reading. It tells a truncated or damaged object from a whole one before any of it is parsed.
"""

from collections.abc import Sequence

import pyarrow as pa

from storage.digests import DIGEST_BYTES, digest_of
from storage.records.unpacked_size import unpacked_bytes
from storage.stores.shortage import raise_shortage
from storage.stores.store import CorruptObject

MAGIC = b"GLEANER1"
# Ordinary objects unpack to less than ten times their size, and equal prompts to more, but then to little.
UNPACKED_BYTES_MAX = 64 << 20
UNPACKED_RATIO_MAX = 64


def append_trailer(body: bytes) -> bytes:
    """The bytes with their trailer."""
    return body + MAGIC + bytes.fromhex(digest_of(body))


def strip_trailer(key: str, body: bytes) -> memoryview:
    """The bytes before the trailer; raises CorruptObject if it is missing or does not match."""
    view = memoryview(body)
    split = len(view) - DIGEST_BYTES - len(MAGIC)
    if split < 0 or bytes(view[split:-DIGEST_BYTES]) != MAGIC:
        raise CorruptObject(key, f"no trailer at the end of its {len(view)} bytes: truncated, or not ours")
    if digest_of(view[:split]) != bytes(view[-DIGEST_BYTES:]).hex():
        raise CorruptObject(key, "its bytes do not match their digest")
    return view[:split]


def trailer_digest(body: bytes) -> str:
    """The digest that the trailer of an Arrow object states."""
    return body[-DIGEST_BYTES:].hex()


def encode_table(table: pa.Table) -> bytes:
    """The table as an Arrow object, compressed with zstd level 1."""
    return encode_batches(table.schema, table.to_batches(), zstd_level=1)


def encode_batches(schema: pa.Schema, batches: Sequence[pa.RecordBatch], *, zstd_level: int) -> bytes:
    """The batches as one Arrow object, compressed, unless a reader would refuse what unpacks to so much more."""
    size = sum(batch.nbytes for batch in batches)
    for codec in (pa.Codec("zstd", compression_level=zstd_level), None):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            for batch in batches:
                writer.write_batch(batch)
        stream = sink.getvalue()
        # Half, because the padding of buffers is not counted here.
        if size <= _unpacked_bytes_max(stream.size) // 2:
            break
    return append_trailer(stream.to_pybytes())


def _unpacked_bytes_max(stored_bytes: int) -> int:
    return max(UNPACKED_BYTES_MAX, UNPACKED_RATIO_MAX * stored_bytes)


def decode_table(key: str, body: bytes, schema: pa.Schema) -> pa.Table:
    """The table in an Arrow object of exactly `schema`, metadata included; raises CorruptObject, which names `key`.

    An object that unpacks to more than UNPACKED_BYTES_MAX, and to more than UNPACKED_RATIO_MAX times its size, is
    refused before it is unpacked. Raises MemoryError where this process cannot hold the table.
    """
    stream = pa.py_buffer(strip_trailer(key, body))
    try:
        size = unpacked_bytes(stream)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise_shortage(error)
        raise CorruptObject(key, f"not an Arrow stream: {error}") from None
    if size > _unpacked_bytes_max(stream.size):
        raise CorruptObject(key, f"its {len(body)} bytes unpack to {size}")
    try:
        # For objects of some 100 KB, threads cost half as much again as they unpack.
        with pa.ipc.open_stream(stream, options=pa.ipc.IpcReadOptions(use_threads=False)) as reader:
            _check_schema(key, reader.schema, schema)
            table = reader.read_all()
        # Offsets that lead out of a buffer would otherwise be followed.
        table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise_shortage(error)
        raise CorruptObject(key, f"not an Arrow stream: {error}") from None
    return table


def _check_schema(key: str, found: pa.Schema, expected: pa.Schema) -> None:
    if found.metadata != expected.metadata:
        raise CorruptObject(key, f"its metadata are {found.metadata}; this Gleaner reads {expected.metadata}")
    if not found.equals(expected):
        raise CorruptObject(key, f"its columns are {found.names}, expected {expected.names}")
