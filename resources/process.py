"""When this process began: what its machine is paid for includes Python's imports. Linux only; elsewhere, now."""

import os
import time
from pathlib import Path


def started_at_s() -> float:
    """Seconds since 1970 UTC when this process was started, to the tick of the kernel's clock."""
    try:
        # Field 22, counted after the command name, which may itself hold blanks and parentheses (proc(5)).
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
