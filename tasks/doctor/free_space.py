"""The free space of a machine for a member or a trainer: memory, shared memory, disk, and a C compiler.

GPUs are examined elsewhere (tasks/doctor/examination.py).
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.records.fitness import Finding

GIB = 1 << 30
# Less than this and no model can be trained or served.
ROOM_MIN_BYTES = GIB
COMPILERS = ("cc", "gcc", "clang")
# What a process may take, where a container limits it: cgroup v2, then v1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_MEMORY, _SHARED = Path("/proc/meminfo"), Path("/dev/shm")  # noqa: S108 - it is measured, not written
_WITHOUT_LIMIT = 1 << 60


@dataclass(frozen=True, kw_only=True)
class FreeSpace:
    """The free space of a memory or a file system.

    Attributes:
        free: free bytes.
        total: total bytes.
        limit: bytes of memory that the container may take; None: no limit.
    """

    free: int
    total: int
    limit: int | None = None

    def __str__(self) -> str:
        limited = "" if self.limit is None else f", of which this container may take {self.limit / GIB:.1f}"
        return f"{self.free / GIB:.1f} of {self.total / GIB:.1f} GiB free{limited}"


def memory_room(meminfo: Path = _MEMORY, limits: Sequence[Path] = _LIMITS) -> FreeSpace | None:
    """The main memory; None on a system without Linux's figures."""
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line)
        free, total = (int(rows[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return None
    return FreeSpace(free=free, total=total, limit=_limit(limits))


def folder_room(folder: Path) -> FreeSpace | None:
    """The free space in a folder's file system; None for a missing folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return FreeSpace(free=usage.free, total=usage.total)


def room_findings(*, has_gpu: bool) -> Iterator[Finding]:
    """Findings about this machine's free space; has_gpu: True requires shared memory and a C compiler, too."""
    memory, folder = memory_room(), Path(tempfile.gettempdir())
    yield room_finding("memory", memory)
    yield room_finding(f"shared memory ({_SHARED})", folder_room(_SHARED), required=has_gpu)
    yield room_finding(f"disk for weights ({folder})", folder_room(folder))
    yield compiler_finding([name for name in COMPILERS if shutil.which(name)], has_gpu=has_gpu)


def room_finding(name: str, room: FreeSpace | None, *, required: bool = True) -> Finding:
    """A finding that is wrong for less than a gibibyte of required free space; unknown space is not wrong."""
    if room is None:
        return Finding(name, "unknown: Linux does not show it here")
    free = room.free if room.limit is None else min(room.free, room.limit)
    lack = (
        f"{free / GIB:.2f} GiB free; at least {ROOM_MIN_BYTES // GIB} GiB is needed" if free < ROOM_MIN_BYTES else None
    )
    return Finding(name, str(room), lack if required else None)


def compiler_finding(found: Sequence[str], *, has_gpu: bool) -> Finding:
    """A finding about the C compiler, with which Triton compiles launchers on a machine with a GPU."""
    lack = "none of them is here, and Triton needs one on a GPU" if has_gpu and not found else None
    return Finding("C compiler", ", ".join(found) or f"none of {', '.join(COMPILERS)}", lack)


def _limit(files: Sequence[Path]) -> int | None:
    for file in files:
        try:
            value = int(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # not there, or "max"
        return value if value < _WITHOUT_LIMIT else None
    return None
