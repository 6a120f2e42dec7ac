"""Discrete events in virtual time: a heap of actions by their time.

A heap and a counter are enough: nothing waits in the middle of a function, so the processes of a library such as simpy
would only add generators. Knows nothing of machines.
"""

import heapq
from collections.abc import Callable
from itertools import count

from storage.errors import GleanerError


class Stalled(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """No event is left, although the end was not reached."""


class Events:
    """Actions by their time in seconds; actions of the same time happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run the action at this time, or now if that has passed."""
        heapq.heappush(self._heap, (max(self.now_s, time_s), next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run the action after a delay in seconds."""
        self.at(self.now_s + delay_s, action)

    def run(self, ended: Callable[[], bool]) -> None:
        """Let time pass until `ended` returns True; raises Stalled if no event is left before."""
        while not ended():
            if not self._heap:
                raise Stalled(f"nothing can happen after second {self.now_s:.0f}")
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
