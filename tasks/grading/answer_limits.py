"""Limits of time and memory for a verifier of Gleaner's own, per answer, in the worker process.

A policy can write an answer that takes for ever: an integral without a value, or text on which a regular expression
backtracks exponentially. The verifier is interrupted, not killed, so the next answer finds it loaded.
"""

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# The parent waits this much longer for an answer that a computation in C keeps from being interrupted, then kills this
# process; a little later the kernel does, in case the parent is gone.
GRACE_S = 1.0
# Beyond what the process has when it is loaded. An honest answer takes a few MB.
_MEMORY_BYTES = 1 << 30


class OutOfTime(BaseException):
    """An answer took its whole time. Not an Exception, because libraries catch exceptions."""


def limit_memory() -> None:
    """From now on, an allocation of more than _MEMORY_BYTES beyond the present memory raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


@contextlib.contextmanager
def limited_time(limit_s: float) -> Iterator[None]:
    """Raise OutOfTime within the block after `limit_s`; the main thread uses it.

    During a computation in C, no Python thread runs that could notice the parent's death. So the kernel ends the
    process after a computation of `limit_s` plus twice GRACE_S.
    """
    signal.signal(signal.SIGALRM, _interrupt)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limit_s + 2 * GRACE_S)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTime
