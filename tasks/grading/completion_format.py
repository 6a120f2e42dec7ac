"""The format verifier: does a completion match a regular expression as a whole.

Runs in the worker process, because some expressions take exponential time; the parent's time limit serves.
"""

import re
import signal

# The parent kills at its limit; this is only for a worker whose parent is gone, a little later.
_GRACE_S = 1.0


class FormatVerifier:
    """A compiled expression; "." matches line ends, too. Used by the main thread of a process of its own."""

    def __init__(self, pattern: str, time_limit_s: float) -> None:
        """Compile `pattern`. The process ends itself when a match takes longer than `time_limit_s` and a second."""
        self._pattern = re.compile(pattern, re.DOTALL)
        self._limit_s = time_limit_s + _GRACE_S
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def grade(self, completion: str) -> float:
        """1.0 when the whole completion matches, else 0.0."""
        # A match lets no other thread run, so nobody here would notice that the parent has died; the kernel does.
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        try:
            return 1.0 if self._pattern.fullmatch(completion) else 0.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
