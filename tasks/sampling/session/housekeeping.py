"""Housekeeping: has one function done at an interval, in a thread of its own or in line with the decode loop.

The thread keeps storage off the decode path; in line, a simulation stays single-threaded and deterministic.
"""

import threading
from collections.abc import Callable

from storage.clock import Clock
from storage.store import StoreUnavailable

JOIN_TIME_LIMIT_S = 60.0


def begins_s(began_s: float, took_s: float, interval_s: float) -> float:
    """When work begins that began at `began_s` the last time, and took `took_s`.

    What is written is safe only when the work has ended. It therefore begins so early that it ends within the interval,
    even if it takes twice as long as the last time.
    """
    return began_s + interval_s - min(2 * took_s, interval_s / 2)


class Housekeeping:
    """What the work raises ends it, and reaches the decode loop by `tick`."""

    def __init__(self, work: Callable[[], None], clock: Clock, *, interval_s: float, background: bool) -> None:
        self._work = work
        self._clock = clock
        self._interval_s = interval_s
        self._thread = threading.Thread(target=self._loop, name="housekeeping", daemon=True) if background else None
        self._stopping = False
        self._awake = threading.Event()
        self._error: BaseException | None = None
        self._due_s = clock.monotonic() + interval_s

    def start(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def tick(self) -> None:
        """Call between two decode steps: raises what the work raised; without a thread, does the work when due."""
        if self._error is not None:
            raise self._error
        if self._thread is None and self._clock.monotonic() >= self._due_s:
            self._due_s = self._clock.monotonic() + self._interval_s
            self._attempt()

    def wake(self) -> None:
        """Have the work done now and not at the end of the interval."""
        self._due_s = self._clock.monotonic()
        self._awake.set()

    def stop(self) -> None:
        """End the thread after the work it is doing; raises StoreUnavailable if that does not end."""
        self.abandon()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(JOIN_TIME_LIMIT_S)
            if self._thread.is_alive():
                raise StoreUnavailable(f"a flush did not end within {JOIN_TIME_LIMIT_S:.0f} s")

    def abandon(self) -> None:
        """End the thread without waiting for it."""
        self._stopping = True
        self._awake.set()

    def _loop(self) -> None:
        began_s, took_s = self._clock.monotonic(), 0.0
        while True:
            self._awake.wait(max(0.0, begins_s(began_s, took_s, self._interval_s) - self._clock.monotonic()))
            self._awake.clear()
            if self._stopping:
                return
            began_s = self._clock.monotonic()
            self._attempt()
            took_s = self._clock.monotonic() - began_s
            if self._error is not None:
                return

    def _attempt(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - handed to the decode loop, which raises it
            self._error = error
