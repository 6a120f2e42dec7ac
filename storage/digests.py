"""The digest of Gleaner's format: the first 128 bits of BLAKE3, written in hexadecimal (docs/format.md section 3)."""

import re

from blake3 import blake3

DIGEST_BYTES = 16
DIGEST_PATTERN = re.compile(r"[0-9a-f]{32}")


class Hasher:
    """Computes a digest from bytes that arrive in parts, in the caller's thread."""

    def __init__(self) -> None:
        self._hasher = blake3(max_threads=1)

    def update(self, data: memoryview | bytes) -> None:
        """Add the next bytes."""
        self._hasher.update(data)

    def hexdigest(self) -> str:
        """The digest of all bytes so far: 32 hexadecimal digits."""
        return self._hasher.hexdigest(length=DIGEST_BYTES)


def digest_of(data: memoryview | bytes) -> str:
    """The digest of `data`: 32 hexadecimal digits."""
    return blake3(data, max_threads=1).hexdigest(length=DIGEST_BYTES)
