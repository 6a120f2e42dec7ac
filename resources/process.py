"""Processes of the operating system: this process's start, memory and descendants, and an end together with a parent.

The start counts because a machine is also paid for while Python imports. Linux only; elsewhere the start is now, there
are no descendants, children outlive their parent, and only Python's collector frees memory.
"""

import ctypes
import gc
import os
import signal
import sys
import time
from pathlib import Path

_PROC = Path("/proc")
_ENDED = frozenset("ZX")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def started_at_s() -> float:
    """Seconds since 1970 UTC at which this process started, to the tick of the kernel's clock."""
    try:
        # Field 22, counted after the command name, which may itself hold blanks and parentheses (proc(5)).
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


def end_with(parent: int) -> None:
    """Get SIGTERM at the death of `parent`, the process that forked this process; end now if the parent is dead.

    The kernel watches the forking thread, so the thread must live as long as `parent`.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


def adopt_orphans() -> None:
    """Have what the descendants of this process leave behind become its children, instead of the system's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def give_back_memory() -> None:
    """Return freed memory to the operating system.

    A process that works through many iterations grows otherwise: cycles of objects wait for Python's collector, and the
    C library keeps freed tensors of ever new sizes, in pieces between memory in use.
    """
    gc.collect()
    if sys.platform == "linux":
        # Only glibc has malloc_trim; musl returns memory by itself.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def is_stopped(process: int) -> bool:
    """Whether a signal, such as SIGSTOP, has stopped this process until SIGCONT; False if that is unknown."""
    found = _stat(_PROC / str(process))
    return found is not None and found[1] == "T"


def descendants(process: int) -> list[int]:
    """The children of `process`, their children, and so on, parents first.

    Ended processes and their children are left out.
    """
    try:
        # In another PID namespace the numbers in /proc name other processes.
        if int((_PROC / "self").readlink().name) != os.getpid():
            return []
        stats = [_stat(entry) for entry in _PROC.iterdir() if entry.name.isdecimal()]
    except (OSError, ValueError):
        return []
    children: dict[int, list[int]] = {}
    for child, state, parent in filter(None, stats):
        if state not in _ENDED:
            children.setdefault(parent, []).append(child)
    found = [process]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def _stat(entry: Path) -> tuple[int, str, int] | None:
    """(process, state, parent) of a directory in /proc; None for an ended process."""
    try:
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return int(entry.name), state, int(parent)
