"""Tells a shortage of this process, such as of memory, from a fault of the bytes that it reads.

Libraries raise the same kinds of exceptions for both. Code that turns such an exception into a statement about bytes
calls `raise_shortage` first, because people delete objects that are called damaged.
"""

import errno

import pyarrow as pa

_OWN = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR})
# What decompressors and memory maps say of it.
_WORDS = ("not enough memory", "cannot allocate memory", "malloc", "out of memory", "allocation error")


def raise_shortage(error: Exception) -> None:
    """Raise MemoryError, or `error` itself, if the process lacks a resource; return if the bytes may be at fault."""
    if isinstance(error, MemoryError | pa.ArrowCancelled) or (isinstance(error, OSError) and error.errno in _OWN):
        raise error
    if not isinstance(error, UnicodeError) and any(word in str(error).lower() for word in _WORDS):
        raise MemoryError(str(error)) from error
