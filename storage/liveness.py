"""Which incarnations live: their heartbeats as one observer sees them, on its own monotonic clock.

A heartbeat says "gone", or it changes, or it does not. Times that another machine wrote are never compared.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage import layout, records
from storage.clock import Clock
from storage.journal import PARALLEL_READS
from storage.records import AliveRecord
from storage.store import ObjectMissing, ObjectStore


@dataclass(frozen=True, slots=True)
class Sign:
    """The last heartbeat of an incarnation (None: there is none), and how long it has not been seen to change."""

    record: AliveRecord | None
    silent_s: float

    def lost(self, claim_ttl_s: float) -> bool:
        """Whether its responses are free: it said that it is gone, or it has been silent for `claim_ttl_s`."""
        return self.silent_s >= claim_ttl_s or (self.record is not None and self.record.state == "gone")


class Liveness:
    """The heartbeats of an iteration as one observer has seen them."""

    def __init__(self, store: ObjectStore, iteration: int, clock: Clock, parallel_reads: int = PARALLEL_READS) -> None:
        self._store = store
        self._iteration = iteration
        self._clock = clock
        self._parallel_reads = parallel_reads
        self._seen: dict[str, tuple[bytes | None, float]] = {}

    def look(self, incarnations: Collection[str]) -> dict[str, Sign]:
        """Read the heartbeats, with one GET each. One that is looked at for the first time has been silent for 0 s."""
        if self._parallel_reads == 1 or len(incarnations) <= 1:
            bodies = [self._body(incarnation) for incarnation in incarnations]
        else:
            with ThreadPoolExecutor(min(self._parallel_reads, len(incarnations))) as pool:
                bodies = list(pool.map(self._body, incarnations))
        return {name: self._sign(name, body) for name, body in zip(incarnations, bodies, strict=True)}

    def _body(self, incarnation: str) -> bytes | None:
        try:
            return self._store.get(layout.alive(self._iteration, incarnation))
        except ObjectMissing:
            return None

    def _sign(self, incarnation: str, body: bytes | None) -> Sign:
        now_s = self._clock.monotonic()
        seen, since_s = self._seen.get(incarnation, (None, now_s))
        if incarnation not in self._seen or seen != body:
            since_s = now_s
            self._seen[incarnation] = (body, now_s)
        key = layout.alive(self._iteration, incarnation)
        record = None if body is None else records.decode(AliveRecord, key, body)
        return Sign(record, now_s - since_s)
