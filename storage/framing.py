"""Arrow objects: one IPC stream with compressed buffers, and a trailer of 24 bytes (docs/format.md section 4).

The trailer is a magic number and a digest of all bytes before it. It follows the Arrow end-of-stream mark, where any
Arrow reader stops reading. It tells a truncated or damaged object from a whole one before any of it is parsed.
"""

import pyarrow as pa

from storage.digests import DIGEST_BYTES, digest_of
from storage.store import CorruptObject

MAGIC = b"GLEANER1"


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


def encode_table(table: pa.Table) -> bytes:
    """The table as an Arrow object, compressed with zstd level 1."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return append_trailer(sink.getvalue().to_pybytes())


def decode_table(key: str, body: bytes, schema: pa.Schema) -> pa.Table:
    """The table in an Arrow object of exactly `schema`, metadata included; raises CorruptObject, which names `key`."""
    stream = strip_trailer(key, body)
    try:
        with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
            if reader.schema.metadata != schema.metadata:
                raise CorruptObject(
                    key, f"its metadata are {reader.schema.metadata}; this Gleaner reads {schema.metadata}"
                )
            if not reader.schema.equals(schema):
                raise CorruptObject(key, f"its columns are {reader.schema.names}, expected {schema.names}")
            return reader.read_all()
    except pa.ArrowInvalid as error:
        raise CorruptObject(key, f"not an Arrow stream: {error}") from None
