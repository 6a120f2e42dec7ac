"""Says for which ranks this rank waits: a rank that hangs says nothing, and torch's errors name no rank.

Every rank meets the others equally often and in equal order, so the *position* of a rank is its number of meetings. A
rank whose position does not change publishes the position, and names the ranks without a published position as high.
The ranks' work does not matter here.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from storage.clock import SystemClock
from storage.waiting import SILENT_S, Wait

LOOK_INTERVAL_S = 1.0
# Before any rank speaks, all others that wait have published.
PUBLISH_S = SILENT_S / 2


class Position:
    """The number of this rank's meetings so far: torch's count of collectives, plus meetings outside collectives."""

    def __init__(self, devices: Sequence[str]) -> None:
        """devices: the types of devices whose tensors the ranks exchange."""
        self._devices = [torch.device(each) for each in devices]
        self._meetings = 0
        self._uneven = 0
        self._at: int | None = None

    @property
    def now(self) -> int:
        """Any thread may ask."""
        at = self._at
        return self._meetings + self._collectives() - self._uneven if at is None else at

    def arrive(self) -> None:
        """Count a meeting of this rank outside collectives."""
        self._meetings += 1

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Count the block as one meeting, whatever each rank sends and receives within the block."""
        before, self._at = self._collectives(), self.now + 1
        try:
            yield
        finally:
            self._uneven += self._collectives() - before
            self._meetings += 1
            self._at = None

    def _collectives(self) -> int:
        group = dist.group.WORLD
        if group is None:
            return 0
        backends = [group._get_backend(each) for each in self._devices]  # noqa: SLF001 - torch shows the numbers nowhere else
        return sum(each._get_sequence_number_for_group() for each in backends)  # type: ignore[attr-defined]  # noqa: SLF001


class MissedRanks:
    """A context manager whose thread names the missed ranks, after ten seconds and then each minute.

    Args:
        rank: The number of this rank.
        world_size: The number of ranks.
        position: This rank's position.
        store: A store of all ranks with a connection for this thread alone.
        limit_s: Seconds after which torch gives up.
    """

    def __init__(self, rank: int, world_size: int, position: Position, store: Store, limit_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._position = position
        self._store = store
        self._limit_s = limit_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="missed ranks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(LOOK_INTERVAL_S)

    def _look_on(self) -> None:
        at, wait, since_s, is_published = -1, self._begun(), time.monotonic(), False
        while not self._ended.wait(LOOK_INTERVAL_S):
            # The group and the store are another thread's to end.
            with suppress(Exception):
                now = self._position.now
                if now != at:
                    at, wait, since_s, is_published = now, self._begun(), time.monotonic(), False
                    continue
                if not is_published and time.monotonic() - since_s >= PUBLISH_S:
                    is_published = True
                    self._store.set(_key(self._rank), str(now))
                if time.monotonic() - since_s >= SILENT_S:
                    missed = missed_by(self._rank, now, self._published())
                    if missed:
                        wait.what = f"{_named(missed)} of {self._world_size}, without which a step does not go on"
                        wait.speak()

    def _begun(self) -> Wait:
        return Wait(
            "", SystemClock(), self._limit_s, "then all ranks fail, and another attempt goes on from what is kept"
        )

    def _published(self) -> list[int | None]:
        keys = [_key(rank) for rank in range(self._world_size)]
        return [int(self._store.get(key)) if self._store.check([key]) else None for key in keys]


def missed_by(rank: int, at: int, published: Sequence[int | None]) -> list[int]:
    """The ranks that `rank`, at position `at`, reports as missed; [] if `rank` is behind or a lower rank reports.

    published: the position that each rank has published; None for a rank without a published position.
    """
    others = {other: place for other, place in enumerate(published) if other != rank}
    waiting = [other for other, place in others.items() if place is not None and place >= at]
    if any(place is not None and place > at for place in others.values()) or any(other < rank for other in waiting):
        return []
    return [other for other in others if other not in waiting]


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _key(rank: int) -> str:
    return f"position/{rank}"
