"""ObjectStore on a local or network directory, safe against concurrent processes and against a kill at any moment.

A body is first written under a temporary name in the directory of its key and then made visible by one atomic system
call: `link` creates (and fails if the name exists), `rename` overwrites. A listing or a delete removes the temporary
files of dead writers and the empty directories that it meets. A temporary name states its writing process: a dead
writer of the same machine is known at once, a dead writer elsewhere only by the age of its file.

The root may be a link, or lie below one. Below the root no verb follows a link, so none reaches what is not the run's.
"""

import errno
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.paths import expanded
from storage.process_identity import is_dead, process_space
from storage.stores.memory import check_body, check_prefix, check_range
from storage.stores.refusals import REFUSED_S_MAX, DeniedForNow, Refusals
from storage.stores.store import ObjectMissing, StorageError, StoreDenied, StoreUnavailable, StoreUnfit, check_key

# An NFS client gives a name that begins so to a file that is deleted while a process has it open.
NFS_DELETED = ".nfs"
# How often a directory may vanish while a writer creates its file, before that is an error.
FOLDER_ATTEMPTS = 100
# Other processes free space, and quotas are raised.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
OBSTRUCTED = frozenset({errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG})
NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class LocalStore:
    """Objects as files below `root`, which is made on the first write.

    With `fsync`, an object that was reported as written survives a power cut, else only a kill of the process. A
    directory cannot hold both an object `a` and objects `a/...`; such a write is refused with StoreDenied. So is every
    key and prefix on whose way there is a link or a device; a listing passes over them. While the disk is full, a write
    waits for at most `refused_s_max`.
    """

    def __init__(self, root: Path, *, fsync: bool = True, refused_s_max: float = REFUSED_S_MAX) -> None:
        self._root = expanded(root).absolute()
        self._fsync = fsync
        self._refusals = Refusals(refused_s_max)

    @property
    def url(self) -> str:
        return str(self._root)

    def create(self, key: str, body: bytes) -> bool:
        path = self._path("create", key)
        check_body(key, body)
        return self._refusals.outlast(lambda: self._create(path, key, body))

    def _create(self, path: Path, key: str, body: bytes) -> bool:
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
            self._sync_entry(path.parent)
        return True

    def put(self, key: str, body: bytes) -> None:
        path = self._path("put", key)
        self._refusals.outlast(lambda: self._put(path, key, body))

    def _put(self, path: Path, key: str, body: bytes) -> None:
        with self._explained("put", key), self._temporary(path, body) as temporary:
            temporary.replace(path)
            self._sync_entry(path.parent)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._path("get", key)
        check_range(start, end)
        return self._refusals.outlast(lambda: self._get(path, key, start, end))

    def _get(self, path: Path, key: str, start: int, end: int | None) -> bytes:
        with self._explained("get", key):
            descriptor = self._open_existing(path, key)
            try:
                return _read_range(descriptor, start, end)
            except IsADirectoryError:
                raise ObjectMissing(key) from None
            finally:
                os.close(descriptor)

    def get_into(self, key: str, start: int, view: memoryview) -> int:
        """Read into `view`, see `ReadsInto`: several times faster than `get`, which fills new memory first."""
        path = self._path("get", key)
        check_range(start, None)
        filled = 0
        with self._explained("get", key):
            descriptor = self._open_existing(path, key)
            try:
                while filled < len(view):
                    part = os.preadv(descriptor, [view[filled:]], start + filled)
                    if not part:
                        break
                    filled += part
            except IsADirectoryError:
                raise ObjectMissing(key) from None
            finally:
                os.close(descriptor)
        return filled

    def list(self, prefix: str, after: str = "") -> list[str]:
        check_prefix(prefix)
        keys: list[str] = []
        folders = [prefix[: prefix.rfind("/") + 1]]
        with self._explained("list", prefix):
            self._refuse_links(folders[0])
            while folders:
                folder = folders.pop()
                for name, is_folder in self._entries(self._root / folder):
                    key = f"{folder}{name}/" if is_folder else f"{folder}{name}"
                    if not key.startswith(prefix):
                        continue
                    # A folder that sorts before `after` and does not begin it holds only keys that sort before `after`.
                    if is_folder and (key >= after or after.startswith(key)):
                        folders.append(key)
                    elif not is_folder and key > after:
                        keys.append(key)
        return sorted(keys)

    def delete(self, key: str) -> None:
        path = self._path("delete", key)
        with self._explained("delete", key), suppress(FileNotFoundError, NotADirectoryError):
            if not path.is_dir():
                path.unlink()
                # The deletion must reach the disk, or a power cut could bring back a manifest without its data.
                self._sync_entry(path.parent)
                self._remove_empty(path.parent)

    def _path(self, verb: str, key: str) -> Path:
        """The file of `key`; raises ValueError for what is no key, and StoreDenied if `verb` may not go there."""
        check_key(key)
        if any(part.startswith((TEMPORARY, NFS_DELETED)) for part in key.split("/")):
            raise ValueError(
                f"not a storage key: {key!r} (parts beginning {TEMPORARY!r} or {NFS_DELETED!r} are temporary files)"
            )
        with self._explained(verb, key):
            self._refuse_links(key)
        return self._root / key

    def _refuse_links(self, key: str) -> None:
        """Raise OSError if something on the way from the root to `key` is neither a file nor a folder."""
        path = str(self._root)
        for part in filter(None, key.split("/")):
            path = f"{path}/{part}"
            try:
                mode = os.lstat(path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise OSError(errno.ELOOP, f"{path} is a link or a device; Gleaner follows none inside a run")

    @contextmanager
    def _temporary(self, path: Path, body: bytes) -> Iterator[Path]:
        """A complete, synced file with `body` next to `path`; removed at the end unless it was renamed."""
        temporary = path.parent / temporary_name()
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

    def _entries(self, folder: Path) -> Iterator[tuple[str, bool]]:
        """(name, is it a folder) of the objects and folders directly in `folder`; nothing if `folder` is missing.

        Links and devices are neither.
        """
        swept, kept = False, False
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(NFS_DELETED):
                    kept = True
                elif not entry.name.startswith(TEMPORARY):
                    kept = True
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if is_folder or entry.is_file(follow_symlinks=False):
                        yield entry.name, is_folder
                elif remove_abandoned(entry):
                    swept = True
        if swept and not kept:
            self._remove_empty(folder)

    def _open_existing(self, path: Path, key: str) -> int:
        """A descriptor of the file `path`; raises ObjectMissing if there is none."""
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise ObjectMissing(key) from None
        except NotADirectoryError:
            # If the store's root is a file, or lies below one, there will never be objects.
            if not self._root.is_dir():
                raise
            raise ObjectMissing(key) from None

    def _open_new(self, path: Path) -> int:
        """A descriptor of the new file `path`; makes its folder again as often as a racing delete removes it."""
        for attempt in range(FOLDER_ATTEMPTS):
            try:
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileNotFoundError:
                try:
                    self._make_folder(path.parent)
                except (FileNotFoundError, FileExistsError):
                    if attempt + 1 == FOLDER_ATTEMPTS:
                        raise
        raise FileNotFoundError(errno.ENOENT, "its folder is removed again and again", str(path.parent))

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # A new folder is itself an entry of its parent that must reach the disk, unless we may not read the parent.
        for parent in (folder, *folder.parents):
            with suppress(PermissionError):
                self._sync_folder(parent)
            if parent == self._root.parent:
                break

    def _remove_empty(self, folder: Path) -> None:
        """Remove `folder` and its parents below the root that hold no object; a writer makes them again."""
        while folder != self._root:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                if not remove_all_abandoned(folder):
                    return
                continue
            folder = folder.parent

    def _sync_entry(self, folder: Path) -> None:
        # If the folder is missing, the object was already deleted again.
        with suppress(FileNotFoundError):
            self._sync_folder(folder)

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
        """Turn the operating system's errors into those of storage/stores/store.py."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            what = f"cannot {verb} {key!r} in {self._root}: {error.strerror or error}"
            if error.errno in FULL or error.errno == errno.EFBIG:
                kind = DeniedForNow if error.errno in FULL else StoreDenied
                raise kind(f"{what}; free some space there or choose another directory") from error
            if error.errno in REFUSED:
                raise StoreDenied(f"{what}; this user must be able to read and write that directory") from error
            if error.errno == errno.ELOOP:
                raise StoreDenied(f"{what}; remove it, or make it a folder or a file") from error
            if error.errno in OBSTRUCTED:
                raise StoreDenied(f"{what}; a file and a folder want the same name, or the name is too long") from error
            raise StoreUnavailable(what) from error


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


TEMPORARY = ".tmp-"
NAME_PATTERN = re.compile(r"\.tmp-([0-9a-f]{32})-([0-9]{1,9})-[0-9a-f]{32}")
# A temporary file without a write for this long has no writer.
ABANDONED_S = 24 * 3600.0


def temporary_name() -> str:
    """A name that is never used twice."""
    return f"{TEMPORARY}{process_space()}-{os.getpid()}-{uuid.uuid4().hex}"


def remove_all_abandoned(folder: Path) -> bool:
    """Remove the files of dead writers in a folder that holds nothing else; True if something was removed."""
    removed = False
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(TEMPORARY) or not remove_abandoned(entry):
                return False
            removed = True
    return removed


def remove_abandoned(entry: os.DirEntry[str]) -> bool:
    """Remove a temporary file whose writer is dead: True when it is gone.

    If the writer lives after all, its write fails with StoreUnavailable, and nothing else happens.
    """
    try:
        if _writer_is_dead(entry.name) or time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_S:
            Path(entry.path).unlink()
            return True
    except FileNotFoundError:
        return True
    except OSError:
        # A reader without the right to delete can still list.
        return False
    return False


def _writer_is_dead(name: str) -> bool:
    """Whether a temporary file's name shows a dead process of this machine; False if that is unknown."""
    writer = NAME_PATTERN.fullmatch(name)
    if writer is None or writer[1] != process_space():
        return False
    return is_dead(int(writer[2]))
