"""Paths as users write them, and files and folders of this user alone where others may write, such as TMPDIR.

A file or folder under a guessable name counts only if it belongs to this user, no other user may write to it, and it is
no link, pipe or device. Nothing else is opened, waited for or removed.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
# The address of a socket has 108 bytes at most, with the zero at its end (unix(7)).
_SOCKET_BYTES_MAX = 107
# The longest name of a socket in such a folder: vLLM's are UUIDs.
_NAME_BYTES_MAX = len("/") + 36
_RANDOM_BYTES = 8


def expanded(path: str | Path) -> Path:
    """The path with `~` or `~user` replaced by the home directory; raises ValueError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise ValueError(f"path: value {str(path)!r}; allowed: no {user!r}, because it has no home directory") from None


def own_folder(path: Path) -> Path:
    """The folder, made with mode 0700 if missing; raises OSError for a folder that is not this user's alone."""
    path.mkdir(mode=0o700, exist_ok=True)
    if not is_own_folder(path):
        raise _refused(path, "directory")
    return path


def is_own_folder(path: Path) -> bool:
    """True if `path` is a folder of this user that no other user may write to."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and _is_own(status)


@contextmanager
def own_file(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of a file that belongs to this user alone, until the end of the block; it never waits.

    flags: as for `os.open`; with O_CREAT the file has mode 0600. Raises OSError for everything else at `path`.
    """
    if not flags & os.O_CREAT or os.path.lexists(path):
        _check_file(path, path.lstat())
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        # It may be another one than a moment ago.
        _check_file(path, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def folder_for_sockets(prefix: str) -> "tempfile.TemporaryDirectory[str]":
    """A new folder of this user alone whose path is short enough for sockets in it: below TMPDIR, if that is.

    Raises OSError if no folder can be made there or where every system has a short one.
    """
    places = (tempfile.gettempdir(), "/tmp", "/dev/shm", "/var/tmp")  # noqa: S108 - the folder's name cannot be guessed
    for place in places:
        length = len(os.fsencode(os.path.join(place, prefix))) + _RANDOM_BYTES  # noqa: PTH118 - as tempfile joins them
        if length + _NAME_BYTES_MAX <= _SOCKET_BYTES_MAX and os.access(place, os.W_OK | os.X_OK):
            return tempfile.TemporaryDirectory(prefix=prefix, dir=place)
    allowed = f"at most {_SOCKET_BYTES_MAX - _NAME_BYTES_MAX - _RANDOM_BYTES - len(prefix) - 1} bytes, because"
    raise OSError(
        errno.ENAMETOOLONG,
        f"TMPDIR: value {places[0]}; allowed: {allowed} sockets have short names, or one of {', '.join(places[1:])} to "
        "which this user may write",
    )


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or not _is_own(status):
        raise _refused(path, "file")


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE


def _refused(path: Path, kind: str) -> OSError:
    return PermissionError(errno.EPERM, f"it is not a {kind} that this user alone may write to", str(path))
