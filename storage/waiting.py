"""A wait that speaks and ends: it says what is waited for, since when and until when, and what happens then.

A process that waits for another for longer than a few seconds makes one of these, and sleeps by its `pause`. The table
of all waits is docs/waits.md.
"""

import logging
import math
from datetime import UTC, datetime

from storage.clock import Clock

log = logging.getLogger(__name__)
SILENT_S = 10.0
REPEAT_S = 60.0


class Wait:
    """One wait on this process's clock. A warning tells of it, because a terminal shows no lower level."""

    def __init__(self, what: str, clock: Clock, limit_s: float, then: str, *, silent_s: float = SILENT_S) -> None:
        """Begin to wait for `what`, for at most `limit_s` without a sign of life (infinity: something else ends it).

        then: what happens at the end, and which option moves it. silent_s: for how long nothing is said.
        """
        self._what = what
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
        """Whether nothing is waited for any longer."""
        return not self.left_s

    def saw_life(self) -> None:
        """What is waited for can still come: the limit counts from now."""
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
        """What is waited for, since when and until when, in a line."""
        now_s, wall_s = self._clock.monotonic(), self._clock.wall()
        since = moment(wall_s - (now_s - self._began_s))
        if math.isinf(self._limit_s):
            return f"waiting for {self._what}, since {since}; {self._then}"
        return f"waiting for {self._what}, since {since} and until {moment(wall_s + self.left_s)}; {self._then}"


def moment(wall_s: float) -> str:
    """A time as people read it, in UTC; all that lies behind the year 9999, the last of a calendar, is its end."""
    return datetime.fromtimestamp(min(wall_s, 253_402_300_799.0), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
