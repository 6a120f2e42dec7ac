"""Which incarnations of members or hosts live: their heartbeats as one observer sees them, on its own monotonic clock.

A heartbeat says "gone", or it changes, or it does not. Times that another machine wrote are never compared. It is a
hint: one that cannot be read (damaged, or of another version of Gleaner) still changes or not, and is nothing worse.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from storage.clock import Clock
from storage.journal.journal import PARALLEL_READS
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import AnyRecord
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)


class AnyHeartbeat(AnyRecord, Protocol):
    """The record of a heartbeat; its key ends with the incarnation and ".json"."""

    @property
    def incarnation(self) -> str: ...

    @property
    def state(self) -> str: ...


HeartbeatT = TypeVar("HeartbeatT", bound=AnyHeartbeat)


@dataclass(frozen=True, slots=True)
class SeenHeartbeat(Generic[HeartbeatT]):
    """What one observer knows of an incarnation.

    record: its last heartbeat; None: there is none, or it cannot be read. silent_s: how long its bytes have not been
    seen to change. found: whether there is a heartbeat, readable or not. changed: whether it was seen to change.
    """

    record: HeartbeatT | None
    silent_s: float
    found: bool = True
    changed: bool = False

    def lost(self, ttl_s: float) -> bool:
        """Whether what it holds is free: it said that it is gone, or it has been silent for `ttl_s`."""
        return self.silent_s >= ttl_s or (self.record is not None and self.record.state == "gone")


def read_heartbeat(store: ObjectStore, key: str) -> HeartbeatRecord | None:
    """The heartbeat of a member under `key`; None if there is none, or if it cannot be read."""
    try:
        return _understood(HeartbeatRecord, key, store.get(key))
    except ObjectMissing:
        return None


def _understood(record_type: type[HeartbeatT], key: str, body: bytes) -> HeartbeatT | None:
    try:
        record = records.decode(record_type, key, body)
    except CorruptObject as error:
        log.debug("a heartbeat is taken for a sign of life only: %s", error)
        return None
    return record if key.endswith(f"/{record.incarnation}.json") and _is_plausible(record) else None


def _is_plausible(record: AnyHeartbeat) -> bool:
    """Whether its counts are not negative and its other numbers finite, so that one may calculate with them."""
    values = [getattr(record, each.name) for each in fields(record)]  # type: ignore[arg-type]
    return all(math.isfinite(number) and (number >= 0 or isinstance(number, float)) for number in _numbers(values))


def _numbers(values: Collection[Any]) -> Iterator[int | float]:
    for value in values:
        if isinstance(value, tuple):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield value


class Heartbeats(Generic[HeartbeatT]):
    """Heartbeats of one kind as one observer has seen them."""

    def __init__(
        self,
        store: ObjectStore,
        record_type: type[HeartbeatT],
        key: Callable[[str], str],
        clock: Clock,
        parallel_reads: int = PARALLEL_READS,
    ) -> None:
        """key: of the heartbeat of an incarnation."""
        self._store = store
        self._record_type = record_type
        self._key = key
        self._clock = clock
        self._parallel_reads = parallel_reads
        self._seen: dict[str, tuple[bytes | None, float, bool]] = {}

    def look(self, incarnations: Collection[str]) -> dict[str, SeenHeartbeat[HeartbeatT]]:
        """Read the heartbeats, with one GET each. One that is looked at for the first time has been silent for 0 s."""
        if self._parallel_reads == 1 or len(incarnations) <= 1:
            read = [self._read(incarnation) for incarnation in incarnations]
        else:
            with ThreadPoolExecutor(min(self._parallel_reads, len(incarnations))) as pool:
                read = list(pool.map(self._read, incarnations))
        return {name: self._sign(name, *each) for name, each in zip(incarnations, read, strict=True)}

    def _read(self, incarnation: str) -> tuple[bytes | None, float, float]:
        """The heartbeat, and when it was asked for and answered."""
        asked_s = self._clock.monotonic()
        try:
            body: bytes | None = self._store.get(self._key(incarnation))
        except ObjectMissing:
            body = None
        return body, asked_s, self._clock.monotonic()

    def _sign(
        self, incarnation: str, body: bytes | None, asked_s: float, answered_s: float
    ) -> SeenHeartbeat[HeartbeatT]:
        """What the heartbeat shows; the time that other heartbeats took to be read is no silence of this one."""
        seen, since_s, changed = self._seen.get(incarnation, (None, answered_s, False))
        if incarnation not in self._seen or seen != body:
            since_s, changed = answered_s, changed or seen is not None
            self._seen[incarnation] = (body, since_s, changed)
        record = None if body is None else _understood(self._record_type, self._key(incarnation), body)
        return SeenHeartbeat(record, max(0.0, asked_s - since_s), found=body is not None, changed=changed)


MemberSign = SeenHeartbeat[HeartbeatRecord]


class Liveness(Heartbeats[HeartbeatRecord]):
    """The heartbeats of an iteration's members as one observer has seen them."""

    def __init__(self, store: ObjectStore, iteration: int, clock: Clock, parallel_reads: int = PARALLEL_READS) -> None:
        super().__init__(store, HeartbeatRecord, partial(layout.alive, iteration), clock, parallel_reads)
