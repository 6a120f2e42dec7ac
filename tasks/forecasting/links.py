"""The time of transferring weights to members over each member's own link and the sender's common link.

A fluid model: at every moment the sender's rate is shared fairly, and no member gets more than its link carries.
Members of a pool have equal links, so one counter of bytes per pool and a heap of ends are enough, however many pull.
"""

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from tasks.crew_model.events import Events

BYTES_PER_GBIT = 1e9 / 8
_DONE_BYTES = 1.0


@dataclass(slots=True)
class _Class:
    """Pulls over equal links. A pull has received the growth of `had` since the start of the pull.

    Attributes:
        link_per_s: bytes per second of a link.
        rate_per_s: present bytes per second of each pull.
        had: bytes received by a pull that began with the simulation.
        ends: (value of `had` at the end, number) of each pull, a heap.
        pulls: function to call at the end of each pull, by number.
    """

    link_per_s: float
    rate_per_s: float = 0.0
    had: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    pulls: dict[int, Callable[[], None]] = field(default_factory=dict)


class Links:
    """Bandwidths in Gbit/s: of the sender (None: unlimited), and of one machine of each pool."""

    def __init__(self, events: Events, upload_gbps: float | None, link_gbps: Mapping[str, float]) -> None:
        self._events = events
        self._upload_per_s = math.inf if upload_gbps is None else upload_gbps * BYTES_PER_GBIT
        self._classes = {pool: _Class(gbps * BYTES_PER_GBIT) for pool, gbps in link_gbps.items()}
        self._numbers = count()
        self._settled_s = 0.0
        self._version = 0

    @property
    def active(self) -> int:
        return sum(len(each.pulls) for each in self._classes.values())

    def pull(self, pool: str, size_bytes: float, done: Callable[[], None]) -> int:
        """Begin a pull by a machine of the pool and call `done` at the end; returns the pull's number for `stop`."""
        self._settle()
        each, number = self._classes[pool], next(self._numbers)
        each.pulls[number] = done
        heapq.heappush(each.ends, (each.had + size_bytes, number))
        self._share()
        return number

    def stop(self, pool: str, number: int) -> None:
        """Forget a pull; does nothing if it has ended."""
        if number in self._classes[pool].pulls:
            self._settle()
            del self._classes[pool].pulls[number]
            self._share()

    def _settle(self) -> None:
        passed_s = self._events.now_s - self._settled_s
        self._settled_s = self._events.now_s
        for each in self._classes.values():
            each.had += each.rate_per_s * passed_s

    def _share(self) -> None:
        """Set fair rates from now on, and the next end; the unused share of a slow link goes to the faster links."""
        self._version += 1
        left_per_s, sharers = self._upload_per_s, self.active
        next_s = math.inf
        for each in sorted(self._classes.values(), key=lambda each: each.link_per_s):
            each.rate_per_s = 0.0
            if not each.pulls:
                continue
            each.rate_per_s = min(each.link_per_s, left_per_s / sharers)
            left_per_s -= each.rate_per_s * len(each.pulls)
            sharers -= len(each.pulls)
            while each.ends[0][1] not in each.pulls:
                heapq.heappop(each.ends)
            next_s = min(next_s, (each.ends[0][0] - each.had) / each.rate_per_s)
        if next_s < math.inf:
            version = self._version
            self._events.after(max(0.0, next_s), lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        ended = []
        for each in self._classes.values():
            while each.ends and (each.ends[0][1] not in each.pulls or each.ends[0][0] <= each.had + _DONE_BYTES):
                done = each.pulls.pop(heapq.heappop(each.ends)[1], None)
                ended += [done] if done else []
        self._share()
        for done in ended:
            done()
