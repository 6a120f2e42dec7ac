"""The 24 bytes that end every Arrow object: a magic and a digest of all bytes before them (docs/format.md section 4).

They stand after the Arrow end-of-stream mark, where any Arrow reader stops reading, and tell a truncated or damaged
object from a whole one before a byte of it is parsed.
"""

import hashlib

from storage.store import CorruptObject

MAGIC = b"GLEANER1"
DIGEST_BYTES = 16


def digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def append_trailer(body: bytes) -> bytes:
    return body + MAGIC + digest(body)


def strip_trailer(key: str, body: bytes) -> memoryview:
    """The bytes before the trailer; raises CorruptObject when it is missing or does not match."""
    view = memoryview(body)
    split = len(view) - DIGEST_BYTES - len(MAGIC)
    if split < 0 or bytes(view[split:-DIGEST_BYTES]) != MAGIC:
        raise CorruptObject(key, f"no trailer at the end of its {len(view)} bytes: truncated, or not ours")
    if digest(view[:split]) != bytes(view[-DIGEST_BYTES:]):
        raise CorruptObject(key, "its bytes do not match their digest")
    return view[:split]
