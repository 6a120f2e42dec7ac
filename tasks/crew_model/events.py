"""Discrete events in virtual time: a heap of actions by their time.

A heap and a counter are enough: no function waits in its middle, so the processes of a library such as simpy would only
add generators. Knows nothing of machines.
"""

import heapq
from collections.abc import Callable
from itertools import count

from storage.errors import GleanerError


class Stalled(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """No event is left, although the end was not reached."""


class Events:
    """Actions by their time in seconds; simultaneous actions run in the order of their scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run the action at `time_s`, or now if `time_s` has passed."""
        heapq.heappush(self._heap, (max(self.now_s, time_s), next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run the action after a delay in seconds."""
        self.at(self.now_s + delay_s, action)

    def run(self, ended: Callable[[], bool]) -> None:
        """Let time pass until `ended` returns True; raises Stalled if the events run out earlier."""
        while not ended():
            if not self._heap:
                raise Stalled(f"nothing can happen after second {self.now_s:.0f}")
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
