"""Housekeeping: calls one function at an interval, in a thread of its own or between decode steps.

The thread keeps storage requests off the decode path. Without it, a simulation is single-threaded and deterministic.
"""

import threading
from collections.abc import Callable

from storage.clock import Clock
from storage.store import StoreUnavailable

JOIN_TIME_LIMIT_S = 60.0


def begins_s(began_s: float, took_s: float, interval_s: float) -> float:
    """The time of the next call, after one that began at `began_s` and took `took_s`.

    Tokens are safe only when `work` returns, so it is called early enough to end within the interval even if it takes
    twice as long as the last time.
    """
    return began_s + interval_s - min(2 * took_s, interval_s / 2)


class Housekeeping:
    """Calls `work` until it raises; `tick` then raises that error in the decode loop."""

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
        """Raise what `work` raised; without a thread, also call it when due. To be called between two decode steps."""
        if self._error is not None:
            raise self._error
        if self._thread is None and self._clock.monotonic() >= self._due_s:
            self._due_s = self._clock.monotonic() + self._interval_s
            self._attempt()

    def wake(self) -> None:
        """Have `work` called now instead of at the end of the interval."""
        self._due_s = self._clock.monotonic()
        self._awake.set()

    def stop(self) -> None:
        """End the thread after its current call; raises StoreUnavailable if that takes over JOIN_TIME_LIMIT_S."""
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
