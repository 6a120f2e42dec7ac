"""Files of tensors in mapped memory, held open: they stay readable when their names are removed."""

import mmap
import os
import weakref
from dataclasses import dataclass


class MappedFile:
    """A file's bytes as private memory. Processes that map the file share the memory of every unwritten page.

    `descriptor` is open as long as the object lives: further processes of this user can map the file, even without a
    name.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the file of an open descriptor, which stays the caller's. OSError, or ValueError for an empty file."""
        # Copy on write: torch wants writable memory, and no reader may change what others read.
        self.data = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True, slots=True)
class FilePosition:
    """The file of a tensor's bytes, and the first byte."""

    file: MappedFile
    start: int


def write_at(descriptor: int, data: memoryview | bytes, start: int) -> None:
    """Write all bytes to an open file, from its byte `start` on; raises OSError."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, start)
        rest, start = rest[written:], start + written
