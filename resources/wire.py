"""Messages between a process and the child that runs a user's code: JSON with a length in front, over two pipes.

The format is JSON, not pickle, so that the other side can send only data, never code. Every wait has a deadline.
"""

import json
import os
import select
import struct
import time
from typing import Any, BinaryIO

_HEADER = struct.Struct(">Q")
HEADER_BYTES = _HEADER.size
_MESSAGE_BYTES_MAX = 1 << 30
_CHUNK_BYTES = 1 << 16


class PeerGone(Exception):  # noqa: N818 - reads as what happened
    """The other end of the pipe is closed."""


def pack(message: dict[str, Any]) -> bytes:
    """Encode a message. ASCII escapes can represent lone surrogates, which a decoder may produce."""
    body = json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    return _HEADER.pack(len(body)) + body


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message of a blocking stream; None at its end."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    size = _HEADER.unpack(header)[0]
    body = stream.read(size)
    return parse(body) if len(body) == size else None


def body_bytes(header: bytes) -> int:
    """The size of the message that follows a header; raises PeerGone for one that no message has."""
    size: int = _HEADER.unpack(header)[0]
    if size > _MESSAGE_BYTES_MAX:
        raise PeerGone  # This is not a message, so the stream is unusable.
    return size


def send(descriptor: int, message: dict[str, Any], deadline_s: float) -> None:
    """Write to a non-blocking pipe until the monotonic `deadline_s`; raises TimeoutError or PeerGone."""
    rest = memoryview(pack(message))
    while rest:
        _wait(descriptor, select.POLLOUT, deadline_s)
        try:
            rest = rest[os.write(descriptor, rest[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            continue
        except BrokenPipeError:
            raise PeerGone from None


def receive(descriptor: int, deadline_s: float) -> dict[str, Any]:
    """Read one message from a non-blocking pipe until the monotonic `deadline_s`; raises TimeoutError or PeerGone."""
    size = body_bytes(_receive_bytes(descriptor, HEADER_BYTES, deadline_s))
    return parse(_receive_bytes(descriptor, size, deadline_s))


def _receive_bytes(descriptor: int, size: int, deadline_s: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        _wait(descriptor, select.POLLIN, deadline_s)
        try:
            chunk = os.read(descriptor, min(size - len(received), _CHUNK_BYTES))
        except BlockingIOError:
            continue
        if not chunk:
            raise PeerGone
        received += chunk
    return bytes(received)


def _wait(descriptor: int, event: int, deadline_s: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, (deadline_s - time.monotonic()) * 1000)):
        raise TimeoutError


def parse(body: bytes) -> dict[str, Any]:
    """The message in the bytes after a header."""
    message: dict[str, Any] = json.loads(body)
    return message
