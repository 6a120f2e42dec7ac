"""Files that users name. A pipe keeps its reader until someone writes, and a device may for ever: neither is opened."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_file(path: Path) -> None:
    """Raise OSError, whose strerror says what it is, if there is a pipe, a socket or a device at the end of `path`."""
    _check(path, path.stat())


def check_files(folder: Path) -> None:
    """The same for everything directly in a folder that a library is to read; the message begins with the file's name.

    What cannot be looked at is passed over.
    """
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            try:
                status = entry.stat()
            except OSError:
                continue
            if kind := _special(status):
                raise _refused(f"{entry.name} in it is {kind}; allowed: files and folders", Path(entry.path))


def open_file(path: Path) -> BinaryIO:
    """Open a file to read; raises OSError as `check_file` and `Path.open` do."""
    check_file(path)
    # It may be another one than a moment ago.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_file(path: Path) -> bytes:
    """All bytes of a file; raises OSError as `open_file` does."""
    with open_file(path) as file:
        return file.read()


def _check(path: Path, status: os.stat_result) -> None:
    if kind := _special(status):
        raise _refused(f"it is {kind}; allowed: a file", path)


def _special(status: os.stat_result) -> str:
    return next((name for holds, name in _KINDS if holds(status.st_mode)), "")


def _refused(reason: str, path: Path) -> OSError:
    return OSError(errno.EINVAL, reason, str(path))
