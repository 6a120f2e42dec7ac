"""ObjectStore on a local or network directory, safe against concurrent processes and against a kill at any moment.

A body is first written under a temporary name in the directory of its key and made visible by one atomic system call:
`link` creates (and fails when the name exists), `rename` overwrites. Knows nothing about what the bodies mean.
"""

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.memory import check_body, check_prefix, check_range
from storage.store import ObjectMissing, StorageError, StoreDenied, StoreUnavailable, StoreUnfit, check_key

TEMPORARY = ".tmp-"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
OBSTRUCTED = frozenset({errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP})
NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class LocalStore:
    """Objects as files below `root`, which is made on the first write.

    With `fsync` an object that was reported as written survives a power cut; without it, only a kill of the process.
    A directory cannot hold both an object `a` and objects `a/...`; such a write is refused with StoreDenied.
    """

    def __init__(self, root: Path, *, fsync: bool = True) -> None:
        self._root = root.expanduser().absolute()
        self._fsync = fsync

    @property
    def url(self) -> str:
        return str(self._root)

    def create(self, key: str, body: bytes) -> bool:
        path = self._path(key)
        check_body(key, body)
        with self._explained("create", key), self._temporary(path, body) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                if path.is_dir():
                    raise
                return False
            except OSError as error:
                if error.errno in NO_HARD_LINKS:
                    reason = f"{self._root}: the file system has no hard links, so nothing can be created atomically"
                    raise StoreUnfit(reason) from error
                raise
            self._sync_folder(path.parent)
        return True

    def put(self, key: str, body: bytes) -> None:
        path = self._path(key)
        with self._explained("put", key), self._temporary(path, body) as temporary:
            temporary.replace(path)
            self._sync_folder(path.parent)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._path(key)
        check_range(start, end)
        with self._explained("get", key):
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except (FileNotFoundError, NotADirectoryError):
                raise ObjectMissing(key) from None
            try:
                return _read_range(descriptor, start, end)
            except IsADirectoryError:
                raise ObjectMissing(key) from None
            finally:
                os.close(descriptor)

    def list(self, prefix: str, after: str = "") -> list[str]:
        check_prefix(prefix)
        keys: list[str] = []
        folders = [prefix[: prefix.rfind("/") + 1]]
        with self._explained("list", prefix):
            while folders:
                folder = folders.pop()
                for name, is_folder in _entries(self._root / folder):
                    key = f"{folder}{name}/" if is_folder else f"{folder}{name}"
                    if not key.startswith(prefix):
                        continue
                    # Everything below a folder that sorts before `after` and does not begin it sorts before it too.
                    if is_folder and (key >= after or after.startswith(key)):
                        folders.append(key)
                    elif not is_folder and key > after:
                        keys.append(key)
        return sorted(keys)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._explained("delete", key), suppress(FileNotFoundError, NotADirectoryError):
            if not path.is_dir():
                path.unlink()

    def _path(self, key: str) -> Path:
        check_key(key)
        if any(part.startswith(TEMPORARY) for part in key.split("/")):
            raise ValueError(f"not a storage key: {key!r} (parts beginning {TEMPORARY!r} are temporary files)")
        return self._root / key

    @contextmanager
    def _temporary(self, path: Path, body: bytes) -> Iterator[Path]:
        """A complete, synced file with `body` next to `path`; removed at the end unless it was renamed."""
        temporary = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            descriptor = self._open_new(temporary)
            try:
                rest = memoryview(body)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                if self._fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield temporary
        finally:
            with suppress(FileNotFoundError, NotADirectoryError):
                temporary.unlink()

    def _open_new(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags, 0o644)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A new folder is itself an entry of its parent that must reach the disk, unless that is not ours to read.
            for folder in path.parents:
                with suppress(PermissionError):
                    self._sync_folder(folder)
                if folder == self._root.parent:
                    break
            return os.open(path, flags, 0o644)

    def _sync_folder(self, folder: Path) -> None:
        if not self._fsync:
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def _explained(self, verb: str, key: str) -> Iterator[None]:
        """Turn what the operating system says into one of the errors of storage/store.py."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            what = f"cannot {verb} {key!r} in {self._root}: {error.strerror or error}"
            if error.errno in FULL:
                raise StoreDenied(f"{what}; free some space there or choose another directory") from error
            if error.errno in REFUSED:
                raise StoreDenied(f"{what}; this user must be able to read and write that directory") from error
            if error.errno in OBSTRUCTED:
                raise StoreDenied(f"{what}; a file and a folder want the same name, or the name is too long") from error
            raise StoreUnavailable(what) from error


def _entries(folder: Path) -> list[tuple[str, bool]]:
    """(name, is it a folder) of what lies directly in `folder`; nothing when it is not there."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(TEMPORARY)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_range(descriptor: int, start: int, end: int | None) -> bytes:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError
    end = status.st_size if end is None else min(end, status.st_size)
    parts: list[bytes] = []
    while start < end:
        part = os.pread(descriptor, end - start, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
