"""The format verifier: whether a completion as a whole matches a regular expression.

It runs in the worker process under the parent's time limit, because some expressions take exponential time.
"""

import re
import signal

# The parent kills this process at its limit; a little later the process ends itself, in case the parent is gone.
_GRACE_S = 1.0


class FormatVerifier:
    """A compiled expression, in which "." also matches line ends. The main thread of a process of its own uses it."""

    def __init__(self, pattern: str, time_limit_s: float) -> None:
        """Compile `pattern`. The process ends itself if a match takes over a second longer than `time_limit_s`."""
        self._pattern = re.compile(pattern, re.DOTALL)
        self._limit_s = time_limit_s + _GRACE_S
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def grade(self, completion: str) -> float:
        """1.0 when the whole completion matches, else 0.0."""
        # During a match no other thread runs, so none would notice that the parent has died; the kernel's timer acts.
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        try:
            return 1.0 if self._pattern.fullmatch(completion) else 0.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
