"""Time as a value: the real clock, and a manual one for tests and simulation.

Protocol decisions use only `monotonic` of their own process; `wall` is for people (timelines, dollars).
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time that can also sleep."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment of this process; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since 1970 UTC by this machine's clock."""
        ...

    def sleep(self, duration_s: float) -> None: ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


class ManualClock:
    """A clock that moves only when it is advanced or slept on."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s

    def advance(self, duration_s: float) -> None:
        self._now_s += duration_s
