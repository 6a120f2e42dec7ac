"""Processes of this machine, by names that tell whether the process lives.

Host name and number are not enough: containers share a host name with process numbers of their own, and numbers are
reused.
"""

import os
import re
import socket
import uuid
from functools import cache
from pathlib import Path

from storage.digests import digest_of

_NAME = re.compile(r"here:.*:(?P<pid>[1-9]\d{0,8}):(?P<space>[0-9a-f]{32})-(?P<start>\d{1,19})", re.ASCII | re.DOTALL)


def process_name() -> str:
    """The name of this process: host and number, for people, and a part unique among all processes."""
    return f"here:{socket.gethostname()}:{os.getpid()}:{process_space()}-{_start(os.getpid())}"


def number_here(name: str) -> int | None:
    """The number of the process of this name if it lives here; None if it has ended, or it cannot be seen from here."""
    named = _of_this_machine(name)
    return named[0] if named is not None and _is_same(*named) else None


def has_ended(name: str) -> bool:
    """True if the name is of a process of this machine that has ended; False if this machine cannot tell."""
    named = _of_this_machine(name)
    return named is not None and not _is_same(*named)


def is_dead(pid: int) -> bool:
    """Whether no process of this number lives; False if that is unknown."""
    try:
        os.kill(pid, 0)
        state = _status(pid)[0]
    except ProcessLookupError:
        return True
    except (OSError, ValueError, IndexError):
        return False
    # Only the parent of a zombie process has not noticed yet.
    return state in ("Z", "X")


@cache
def process_space() -> str:
    """32 hex digits that identify the kernel's boot and the namespace in which this process's number is valid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        space = boot + bytes(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = uuid.uuid4().bytes
    return digest_of(space)


def _of_this_machine(name: str) -> tuple[int, int] | None:
    """(number, start) of a process whose number is valid here."""
    found = _NAME.fullmatch(name)
    if found is None or found["space"] != process_space():
        return None
    return int(found["pid"]), int(found["start"])


def _is_same(pid: int, start: int) -> bool:
    return not is_dead(pid) and _start(pid) == start


def _start(pid: int) -> int:
    """The ticks from the kernel's boot to the start of a process; 0 if they cannot be read."""
    try:
        return int(_status(pid)[19])
    except (OSError, ValueError, IndexError):
        return 0


def _status(pid: int) -> list[str]:
    """The fields of a process from its state on, which follows its command in parentheses (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
