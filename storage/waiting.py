"""Waits that log subject, beginning, limit, and the consequence of the end.

A process that waits for another process for longer than a few seconds makes a `Wait` and sleeps by its `pause`.
`StoppedProcesses` waits for processes of this machine that a signal has stopped. docs/waits.md lists all waits.
"""

import logging
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from storage.clock import Clock

log = logging.getLogger(__name__)
# Takes how far something long is: what is done now, how much of it is done, out of how much (0: not known).
Progress = Callable[[str, int, int], None]
SILENT_S = 10.0
REPEAT_S = 60.0
# Enough to look at a process in a debugger or to let it go on by hand; a machine is paid for meanwhile.
STOPPED_LIMIT_S = 600.0
STOPPED_LOOK_S = 2.0


def no_progress(what: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


class Wait:
    """One wait on this process's clock. Its lines are warnings, because a terminal shows no lower level."""

    def __init__(self, what: str, clock: Clock, limit_s: float, then: str, *, silent_s: float = SILENT_S) -> None:
        """Begin to wait for `what`, for at most `limit_s` without a sign of life (infinity: something else ends it).

        then: the consequence of the end, and the option that moves the end. silent_s: seconds before the first log
        line. The attribute `what` may change during the wait.
        """
        self.what = what
        self._clock = clock
        self._limit_s = limit_s
        self._then = then
        self._began_s = clock.monotonic()
        self._sign_s = self._began_s
        self._next_word_s = self._began_s + silent_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._sign_s + self._limit_s - self._clock.monotonic())

    @property
    def is_over(self) -> bool:
        """True if the time for waiting has run out."""
        return not self.left_s

    def saw_life(self) -> None:
        """Note a sign of life: the limit counts from now."""
        self._sign_s = self._clock.monotonic()

    def pause(self, interval_s: float) -> None:
        """Sleep until the next look, but not beyond the end; speak, if it is time to."""
        self.speak()
        self._clock.sleep(min(interval_s, self.left_s))

    def speak(self) -> None:
        """Log a line about this wait, if nothing was said for a while; for waits that do not sleep by `pause`."""
        now_s = self._clock.monotonic()
        if now_s >= self._next_word_s:
            self._next_word_s = now_s + REPEAT_S
            log.warning("%s", self.described())

    def described(self) -> str:
        """The subject of the wait, its beginning and its end, in a line."""
        now_s, wall_s = self._clock.monotonic(), self._clock.wall()
        since = moment(wall_s - (now_s - self._began_s))
        if math.isinf(self._limit_s):
            return f"waiting for {self.what}, since {since}; {self._then}"
        return f"waiting for {self.what}, since {since} and until {moment(wall_s + self.left_s)}; {self._then}"


class StoppedProcesses:
    """Waits for processes of one kind that a signal has stopped (SIGSTOP, state T), again and again."""

    def __init__(self, clock: Clock, then: str, limit_s: float = STOPPED_LIMIT_S) -> None:
        """then: what happens to them when they have been stopped for `limit_s`, as in "they are killed"."""
        self._clock = clock
        self._then = then
        self._limit_s = limit_s
        self._who = ""
        self._wait: Wait | None = None

    def given_up(self, stopped: Mapping[str, int]) -> str | None:
        """Log the processes that are stopped now, every few seconds; returns the reason for giving them up, once due.

        stopped: numbers of the processes, by the names that people know. The limit counts for an unchanged set of
        processes.
        """
        who = " and ".join(f"{name} (process {process})" for name, process in stopped.items())
        if who != self._who or self._wait is None:
            numbers = " ".join(map(str, stopped.values()))
            then = f"then {self._then}; `kill -CONT {numbers}` lets what is stopped go on"
            what = f"{who}, which a signal has stopped (state T)"
            self._who, self._wait = who, Wait(what, self._clock, self._limit_s, then)
        if not stopped:
            return None
        self._wait.speak()
        return f"{who} was stopped by a signal for {self._limit_s:.0f} s" if self._wait.is_over else None


def moment(wall_s: float) -> str:
    """A time as people read it, in UTC; times beyond the year 9999, the last of a calendar, show as its end."""
    return datetime.fromtimestamp(min(wall_s, 253_402_300_799.0), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
