"""The queue before admission to a fleet: which waiting runs a run may pass, and the heartbeat of a waiting run."""

import logging
import math
from collections.abc import Mapping

from storage.clock import Clock
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import FleetRecord, WaitingRun
from storage.records import records
from storage.records.records import nonce
from storage.stores.store import ObjectStore, StorageError
from storage.waiting import Wait

log = logging.getLogger(__name__)
BEATS_PER_TTL = 6


def may_not_pass(waited_s: float, others_s: Mapping[str, float], patience_s: float) -> str | None:
    """The name of the run that must be admitted first; None if no run is in the way. Pure.

    A run that can be admitted passes runs that wait for more room, until a run has waited longer than `patience_s`; of
    several impatient runs the longest waiting is next. A run that came later is never in the way.

    Args:
        waited_s: Seconds that the run has waited.
        others_s: Seconds that the competing runs have waited, by name.
        patience_s: The fleet's patience.
    """
    in_the_way = {name: other_s for name, other_s in others_s.items() if other_s > max(waited_s, patience_s)}
    return min(in_the_way, key=lambda name: (-in_the_way[name], name), default=None)


class Waiting:
    """The wait of one process for admission: the waiting time, and the heartbeat in the fleet."""

    def __init__(self, store: ObjectStore, fleet: FleetRecord, run_url: str, clock: Clock) -> None:
        self.incarnation = nonce()
        self._store = store
        self._interval_s = fleet.host_ttl_s / BEATS_PER_TTL
        self._run_url = run_url
        self._clock = clock
        self._began_s = self._next_beat_s = clock.monotonic()
        self._beats = 0
        self._wait = Wait(f"the fleet {store.url} to admit {run_url}", clock, math.inf, "Ctrl-C ends it")

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began, on the clock of this process."""
        return self._clock.monotonic() - self._began_s

    def beat_if_due(self) -> None:
        """Write the heartbeat several times in a TTL; a store that refuses it is logged."""
        if self._clock.monotonic() >= self._next_beat_s:
            self._next_beat_s = self._clock.monotonic() + self._interval_s
            self._beat(is_gone=False)

    def rest(self) -> None:
        """Sleep until the next heartbeat, and write the heartbeat; the caller prints the reason of the wait."""
        self._wait.pause(max(0.0, self._next_beat_s - self._clock.monotonic()))
        self.beat_if_due()

    def end(self) -> None:
        """Withdraw from the queue, by a last heartbeat "gone"."""
        self._beat(is_gone=True)

    def _beat(self, *, is_gone: bool) -> None:
        beat = WaitingRun(
            incarnation=self.incarnation,
            sequence=self._beats,
            run_url=self._run_url,
            waited_s=self.waited_s,
            state="gone" if is_gone else "waiting",
        )
        self._beats += 1
        try:
            records.put(self._store, fleet_layout.waiting(self.incarnation), beat)
        except StorageError as error:
            log.warning("%s: others cannot see that %s waits: %s", self._store.url, self._run_url, error)
