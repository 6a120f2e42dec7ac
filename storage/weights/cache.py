"""Weights on the disk of one machine, shared by its processes: a bounded directory that may be deleted at any time.

A pack is one file with the tensors that one pull had to fetch, by digest. A pack is written whole and renamed, never
trusted (every read is hashed), and mapped, so that processes share its memory. This module knows nothing of stores,
encodings of versions or models.
"""

import fcntl
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from storage.clock import Clock
from storage.digests import digest_of
from storage.paths import expanded, is_own_folder, own_file
from storage.threads import Check, in_threads
from storage.waiting import Wait
from storage.weights.manifest import TensorBlock, TensorEntry
from storage.weights.mapped import FilePosition, MappedFile, write_at
from storage.weights.objects import THREADS

log = logging.getLogger(__name__)
PACK, TEMPORARY, LOCK = ".pack", ".part", ".lock"
HEADER_LENGTH_BYTES = 8
HEADER_BYTES_MAX = 64 << 20
ALIGNMENT_BYTES = 64
LOCK_WAIT_S = 600.0
LOCK_POLL_S = 0.1
FREE_SHARE_MAX = 0.5  # all packs may take this share of what the file system would have free without them


@dataclass(frozen=True)
class _Pack:
    """The header of a pack; `places`: first byte and end of each tensor, by digest."""

    path: Path
    run_url: str
    version: int
    places: dict[str, tuple[int, int]]


class WeightCache:
    """Tensors below `directory`, in at most `bytes_max` bytes; the least recently used packs are removed first."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._packs: dict[Path, _Pack] = {}
        self._maps: dict[Path, MappedFile] = {}

    def refresh(self) -> None:
        """Look which packs exist now."""
        found = {}
        for path in sorted(self._directory.glob(f"*{PACK}")):
            pack = self._packs.get(path) or _read_header(path)
            if pack is not None:
                found[path] = pack
        self._packs = found
        self._maps = {path: file for path, file in self._maps.items() if path in found}

    def newest_held(self, run_url: str, version: int) -> int | None:
        """The newest version of a run, up to `version`, with at least one cached tensor."""
        return max(
            (p.version for p in self._packs.values() if p.run_url == run_url and p.version <= version), default=None
        )

    def find(self, entries: Mapping[str, TensorEntry], check: Check = lambda: None) -> dict[str, TensorBlock]:
        """The wanted tensors that are cached, verified, in mapped memory; writes to this memory stay private."""
        blocks = in_threads(THREADS, self._find, entries.values(), check)
        return {name: block for name, block in zip(entries, blocks, strict=True) if block is not None}

    def has_room(self, num_bytes: int) -> bool:
        """Whether tensors of this many bytes would be kept."""
        try:
            return num_bytes <= self._allowed(self._by_last_use())
        except OSError:
            return False

    @contextmanager
    def fetching(
        self, name: str, clock: Clock, check: Check = lambda: None, wait_s: float = LOCK_WAIT_S
    ) -> Iterator[None]:
        """Let one process of this machine at a time fetch `name`; after `wait_s` seconds, fetch without the lock.

        `check` is called while waiting; an exception from it ends the wait.
        """
        path = self._directory / f"{name}{LOCK}"
        with ExitStack() as stack:
            try:
                descriptor = stack.enter_context(own_file(path, os.O_RDWR | os.O_CREAT))
            except OSError as error:
                log.warning("%s: %s; fetching without the lock", path, error.strerror)
                yield
                return
            what = f"another process of this machine to fetch {name} (it holds {path})"
            waiting = Wait(what, clock, wait_s, "then this one fetches it, too")
            while not (locked := _try_lock(descriptor)) and not waiting.is_over:
                check()
                waiting.pause(LOCK_POLL_S)
            if not locked:
                log.warning("%s is held for %g s; fetching without it", path, wait_s)
            yield
            if locked:
                # A waiting process has the file open and gets its lock; a process that comes later makes a new file.
                path.unlink(missing_ok=True)

    def store(
        self,
        run_url: str,
        version: int,
        tensors: Mapping[str, tuple[TensorEntry, TensorBlock]],
        check: Check = lambda: None,
    ) -> dict[str, TensorBlock]:
        """Keep verified tensors, and return the kept ones in mapped memory.

        Tensors that do not fit or cannot be written are not kept, without an error. `check` is called between tensors;
        after its exception nothing is kept.
        """
        blocks = {entry.digest: block for entry, block in tensors.values() if block.num_bytes}
        if not blocks:
            return {}
        header, places = _header(run_url, version, blocks)
        total = len(header) + max(end for _, end in places.values())
        temporary = self._directory / f"{uuid.uuid4().hex}{TEMPORARY}"
        try:
            if not self._make_room(total):
                return {}
            _write_pack(temporary, header, places, blocks, check)
            file = self._mapped(temporary.rename(temporary.with_suffix(PACK)))
        except OSError as error:
            log.warning("weight cache %s: %s; these weights are not kept", self._directory, error.strerror or error)
            return {}
        finally:
            temporary.unlink(missing_ok=True)
        if file is None:  # another process has made room meanwhile
            return {}
        shifted = {digest: (len(header) + start, len(header) + end) for digest, (start, end) in places.items()}
        return {
            name: _block(entry, file, *shifted[entry.digest])
            for name, (entry, _) in tensors.items()
            if entry.digest in shifted
        }

    def _find(self, entry: TensorEntry) -> TensorBlock | None:
        if not entry.num_bytes:
            return TensorBlock(entry.dtype, entry.shape, b"")
        for path, pack in list(self._packs.items()):
            start, end = pack.places.get(entry.digest, (0, 0))
            file = self._mapped(path) if end - start == entry.num_bytes else None
            if file is None or end > len(file.data):
                continue
            block = _block(entry, file, start, end)
            if digest_of(block.data) == entry.digest:
                return block
            log.warning("%s does not match its digests, and is removed", path)
            self._forget(path)
        return None

    def _mapped(self, path: Path) -> MappedFile | None:
        if path not in self._maps:
            try:
                with own_file(path) as descriptor:
                    os.utime(descriptor)  # used now, so removed last
                    self._maps[path] = MappedFile(descriptor)
            except (OSError, ValueError):  # removed meanwhile, or empty
                self._packs.pop(path, None)
                return None
        return self._maps[path]

    def _forget(self, path: Path) -> None:
        self._packs.pop(path, None)
        self._maps.pop(path, None)
        with suppress(OSError):
            path.unlink()

    def _make_room(self, num_bytes: int) -> bool:
        """Remove the files of dead writers, then packs, the least recently used first, until `num_bytes` more fit.

        Returns False, and removes no pack, if `num_bytes` exceed the limit even without packs.
        """
        for path in self._directory.glob(f"*{TEMPORARY}"):
            with suppress(OSError), own_file(path) as descriptor:
                if _try_lock(descriptor):
                    path.unlink()
        packs = self._by_last_use()
        allowed = self._allowed(packs)
        if num_bytes > allowed:
            log.warning(
                "weight cache %s: %d bytes do not fit; allowed: %d, of bytes_max %d and of what the disk can spare",
                self._directory,
                num_bytes,
                allowed,
                self._bytes_max,
            )
            return False
        held = sum(size for _, _, size in packs)
        for _, path, size in packs:
            if held + num_bytes <= allowed:
                break
            self._forget(path)
            held -= size
        return True

    def _by_last_use(self) -> list[tuple[int, Path, int]]:
        """(time of last use, pack, bytes) of each pack; the least recently used first."""
        packs = []
        for path in self._directory.glob(f"*{PACK}"):
            with suppress(OSError):
                status = path.lstat()
                packs.append((status.st_mtime_ns, path, status.st_size))
        return sorted(packs)

    def _allowed(self, packs: list[tuple[int, Path, int]]) -> int:
        """The most bytes that packs may take, given the present ones."""
        status = os.statvfs(self._directory)
        free = status.f_bavail * status.f_frsize
        return min(self._bytes_max, int(FREE_SHARE_MAX * (free + sum(size for _, _, size in packs))))


def open_cache(directory: str | None, bytes_max: int) -> WeightCache | None:
    """The cache in `directory`; None if the cache is off or the directory unsafe.

    `directory` None stands for a directory of this user below the system's temporary directory. A missing directory is
    made with mode 0700. A directory that another user owns or may write to is not used, because mapped files must not
    change.
    """
    if not bytes_max:
        return None
    path = expanded(directory) if directory else Path(tempfile.gettempdir()) / f"gleaner-weights-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=directory is not None, exist_ok=True)
    except OSError as error:
        log.warning("weight cache %s: %s; weights are not cached", path, error.strerror)
        return None
    if path.is_symlink():
        log.warning("weight cache %s is a link; allowed: what the link leads to; weights are not cached", path)
        return None
    if not is_own_folder(path):
        log.warning(
            "weight cache %s is not a directory that this user alone may write to; weights are not cached",
            path,
        )
        return None
    return WeightCache(path, bytes_max)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _header(run_url: str, version: int, blocks: Mapping[str, TensorBlock]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The header of a pack, and first byte and end of each tensor behind the header, by digest.

    The header is a length of 8 little-endian bytes, then JSON of that length, padded. Places count from the padding's
    end.
    """
    places = {}
    end = 0
    for key, block in blocks.items():
        start = _aligned(end)
        end = start + block.num_bytes
        places[key] = (start, end)
    text = json.dumps({"run_url": run_url, "version": version, "places": places}).encode()
    header = len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text
    return header.ljust(_aligned(len(header)), b" "), places


def _block(entry: TensorEntry, file: MappedFile, start: int, end: int) -> TensorBlock:
    return TensorBlock(entry.dtype, entry.shape, file.data[start:end], FilePosition(file, start))


def _write_pack(
    path: Path, header: bytes, places: Mapping[str, tuple[int, int]], blocks: Mapping[str, TensorBlock], check: Check
) -> None:
    """Write a pack; until the end, a lock on the file shows that the writer lives.

    The pack is not synced: the digests of its tensors expose a pack damaged by a power cut.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.posix_fallocate(descriptor, 0, len(header) + max(end for _, end in places.values()))
        write_at(descriptor, header, 0)
        in_threads(
            THREADS,
            lambda key: write_at(descriptor, blocks[key].data, len(header) + places[key][0]),
            blocks,
            check,
        )
    finally:
        os.close(descriptor)


def _read_header(path: Path) -> _Pack | None:
    """The header of a pack; a pack that cannot be read is removed."""
    try:
        with own_file(path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
            length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
            header = json.loads(file.read(min(length, HEADER_BYTES_MAX)))
        shift = _aligned(HEADER_LENGTH_BYTES + length)
        places = {key: (shift + int(start), shift + int(end)) for key, (start, end) in header["places"].items()}
        return _Pack(path, str(header["run_url"]), int(header["version"]), places)
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        log.warning("%s cannot be read, and is removed", path)
        with suppress(OSError):
            path.unlink()
        return None


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
