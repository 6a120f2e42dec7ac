"""Which incarnations of members or hosts live, as one observer sees heartbeats on its own monotonic clock.

A heartbeat says "gone", changes, or stays the same. Times written by other machines are never compared. Heartbeats are
hints: the bytes of an unreadable heartbeat (damaged, or of another version of Gleaner) still show change or silence.
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

    Attributes:
        record: the last heartbeat; None: missing or unreadable.
        silent_s: seconds since this observer last saw the bytes change.
        found: True if a heartbeat object exists, readable or not.
        changed: True once this observer has seen the bytes change.
    """

    record: HeartbeatT | None
    silent_s: float
    found: bool = True
    changed: bool = False

    def lost(self, ttl_s: float) -> bool:
        """True if the responses or seats of the incarnation are free: state "gone", or silent for `ttl_s`."""
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
    """True if every count is >= 0 and every float is finite."""
    values = [getattr(record, each.name) for each in fields(record)]  # type: ignore[arg-type]
    return all(math.isfinite(number) and (number >= 0 or isinstance(number, float)) for number in _numbers(values))


def _numbers(values: Collection[Any]) -> Iterator[int | float]:
    for value in values:
        if isinstance(value, tuple):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield value


class Heartbeats(Generic[HeartbeatT]):
    """Heartbeats of a record type, as a single observer sees them."""

    def __init__(
        self,
        store: ObjectStore,
        record_type: type[HeartbeatT],
        key: Callable[[str], str],
        clock: Clock,
        parallel_reads: int = PARALLEL_READS,
    ) -> None:
        """key: maps an incarnation to the key of its heartbeat."""
        self._store = store
        self._record_type = record_type
        self._key = key
        self._clock = clock
        self._parallel_reads = parallel_reads
        self._seen: dict[str, tuple[bytes | None, float, bool]] = {}

    def look(self, incarnations: Collection[str]) -> dict[str, SeenHeartbeat[HeartbeatT]]:
        """Read the heartbeats, with one GET each. At its first look an incarnation has been silent for 0 s."""
        if self._parallel_reads == 1 or len(incarnations) <= 1:
            read = [self._read(incarnation) for incarnation in incarnations]
        else:
            with ThreadPoolExecutor(min(self._parallel_reads, len(incarnations))) as pool:
                read = list(pool.map(self._read, incarnations))
        return {name: self._sign(name, *each) for name, each in zip(incarnations, read, strict=True)}

    def _read(self, incarnation: str) -> tuple[bytes | None, float, float]:
        """The bytes of the heartbeat, and the monotonic times of the request and the answer."""
        asked_s = self._clock.monotonic()
        try:
            body: bytes | None = self._store.get(self._key(incarnation))
        except ObjectMissing:
            body = None
        return body, asked_s, self._clock.monotonic()

    def _sign(
        self, incarnation: str, body: bytes | None, asked_s: float, answered_s: float
    ) -> SeenHeartbeat[HeartbeatT]:
        """What the heartbeat shows; time spent on reading other heartbeats is not counted as silence."""
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
