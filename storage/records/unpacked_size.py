"""How many bytes an Arrow stream unpacks to, from its messages alone: nothing is decompressed.

Arrow says so before each compressed buffer, and refuses a buffer that unpacks to another length.
"""

import struct

import pyarrow as pa

_HEADER, _BUFFERS, _COMPRESSION = 2, 2, 3  # fields of the flatbuffers Message and RecordBatch, by number
_LENGTH_BYTES = 8


def unpacked_bytes(stream: pa.Buffer) -> int:
    """Bytes of all buffers of a stream of record batches; raises ValueError for anything else."""
    total = 0
    for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(stream)):
        if message.type == "record batch":
            try:
                total += _of_batch(message.metadata.to_pybytes(), message.body)
            except struct.error as error:
                raise ValueError(f"a message that is no record batch: {error}") from None
        elif message.type != "schema":
            raise ValueError(f"a message of the type {message.type!r}; allowed: record batches")
    return total


def _of_batch(metadata: bytes, body: pa.Buffer) -> int:
    batch = _indirect(metadata, _field(metadata, _indirect(metadata, 0), _HEADER))
    vector = _indirect(metadata, _field(metadata, batch, _BUFFERS))
    is_packed = _field(metadata, batch, _COMPRESSION) != 0
    (count,) = struct.unpack_from("<I", metadata, vector)
    total = 0
    view = memoryview(body)
    for number in range(count):
        offset, length = struct.unpack_from("<qq", metadata, vector + 4 + 16 * number)
        if offset < 0 or length < 0:
            raise ValueError("a buffer of a negative length")
        stated = struct.unpack_from("<q", view, offset)[0] if is_packed and length else -1
        # -1 stands before a buffer that is stored as it is.
        total += stated if stated >= 0 else length
    return total


def _indirect(data: bytes, at: int) -> int:
    """Where the offset at a place leads."""
    return int(at + struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a table lies; 0 if the table does not have it."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise ValueError("a table without a description")
    (size,) = struct.unpack_from("<H", data, vtable)
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + at)[0] if at < size else 0
    return int(table + offset) if offset else 0
