"""What the kernel knows of processes: when this one started, which ones it has started, and that they end with it.

The start counts because a machine is also paid for while Python imports. Linux only; elsewhere the start is now, there
are no descendants, and children outlive their parent.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PROC = Path("/proc")
_ENDED = frozenset("ZX")
# Asks for SIGTERM at the parent's death (prctl PR_SET_PDEATHSIG), which stays in force over exec, and becomes the
# command. A parent that died before is told from its successor's number. A program, because code between fork and exec
# may deadlock in a process with threads.
_TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() != int(sys.argv[1]):
    sys.exit(128 + signal.SIGTERM)
os.execv(sys.argv[2], sys.argv[2:])
"""


def started_at_s() -> float:
    """Seconds since 1970 UTC at which this process started, to the tick of the kernel's clock."""
    try:
        # Field 22, counted after the command name, which may itself hold blanks and parentheses (proc(5)).
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


def tied(command: Sequence[str]) -> list[str]:
    """The command (its first part is a path) of a child of this process that gets SIGTERM when this process dies.

    The kernel looks at the thread that starts the child, so that thread must live until the child has ended.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def descendants(process: int) -> list[int]:
    """The children of `process`, their children, and so on, parents first.

    Processes that have ended are left out, and so are the children of those.
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
    """(process, its state, its parent) of a directory in /proc; None if it has ended."""
    try:
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return int(entry.name), state, int(parent)
