"""Reads a fleet from outside: its runs, its hosts, and which hosts live.

For commands and tasks, which look once; a host keeps observations between two looks (`tasks/sharing/seating.py`).
Several teams write to a fleet, so each record is read on its own, and is believed only about itself.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from storage.clock import Clock
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import (
    AdmittedRun,
    FleetRecord,
    Found,
    HostBeat,
    HostRecord,
    SeatRecord,
    WaitingRun,
    read_record,
)
from storage.fleet.seats import newest_seat
from storage.fleet.spent_records import SpentRecord
from storage.journal.liveness import Heartbeats, HeartbeatT
from storage.records.run import exists
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, StoreDenied
from storage.waiting import Wait

log = logging.getLogger(__name__)
LOOK_INTERVAL_S = 1.0

Result = TypeVar("Result")


def read_run(store: ObjectStore, run_id: str) -> AdmittedRun:
    """The record that admits a run; raises ObjectMissing, and CorruptObject also if it is of another run."""
    key = fleet_layout.admitted(run_id)
    run = read_record(store, AdmittedRun, key)
    if fleet_layout.run_id(run.run_url) != run_id:
        raise CorruptObject(key, f"it admits another run, {run.run_url!r}")
    return run


def read_allowed_run(store: ObjectStore, fleet: FleetRecord, run_id: str) -> AdmittedRun:
    """`read_run` of a run that the fleet allows; raises CorruptObject for a run of any other place."""
    run = read_run(store, run_id)
    if not fleet.allows(run.run_url):
        allowed = ", ".join(fleet.run_prefixes)
        raise CorruptObject(fleet_layout.admitted(run_id), f"run_url {run.run_url!r}; allowed: {allowed}")
    return run


def has_left(store: ObjectStore, run_id: str) -> bool:
    """Whether a run has left the fleet for good."""
    return exists(store, fleet_layout.left(run_id))


class FleetReader:
    """Reads each record of a fleet by itself.

    `damaged` has a line for each unreadable record, in order. The methods raise StoreUnavailable for a silent store.
    """

    def __init__(self, store: ObjectStore, fleet: FleetRecord) -> None:
        self._store = store
        self._fleet = fleet
        self.damaged: list[str] = []

    def run_ids(self) -> list[str]:
        """The ids of all runs that were ever admitted, in order, whether their records can be read or not."""
        keys = self._store.list(fleet_layout.RUNS)
        return sorted({run for key in keys if (run := fleet_layout.run_of(key)) is not None})

    def runs(self) -> list[AdmittedRun]:
        """The runs that were ever admitted, by id."""
        return self._read(lambda run: read_allowed_run(self._store, self._fleet, run), self.run_ids())

    def seat(self, run: str) -> SeatRecord | None:
        """The newest epoch of a run's seat; None without a readable seat."""
        return next(iter(self._read(lambda run: newest_seat(self._store, run), [run])), None)

    def hosts(self) -> list[HostRecord]:
        """All incarnations of hosts in the fleet's history."""
        return self.records(HostRecord, self._store.list(fleet_layout.HOSTS))

    def host(self, incarnation: str) -> HostRecord | None:
        """The host of this incarnation; None without a readable record."""
        return next(iter(self.records(HostRecord, [fleet_layout.host(incarnation)])), None)

    def beat(self, incarnation: str) -> HostBeat | None:
        """The last heartbeat of a host; None without a readable heartbeat."""
        key = fleet_layout.alive(incarnation)
        return next(iter(self.records(HostBeat, [key] if exists(self._store, key) else [])), None)

    def spent(self, incarnation: str, last: int = 0) -> list[SpentRecord]:
        """The spent time of a host, in order; last: number of records to read from the end, 0: all."""
        return self.records(SpentRecord, self._store.list(fleet_layout.spent_by(incarnation))[-last:])

    def waiting(self) -> list[WaitingRun]:
        """The last heartbeats of the processes that wait until their runs are admitted."""
        found = self.records(WaitingRun, self._store.list(fleet_layout.WAITING))
        return [each for each in found if each.state == "waiting"]

    def records(self, kind: type[Found], keys: Iterable[str]) -> list[Found]:
        """The records at these keys."""
        return self._read(lambda key: read_record(self._store, kind, key), keys)

    def _read(self, read: Callable[[str], Result | None], names: Iterable[str]) -> list[Result]:
        found = []
        for name in names:
            try:
                record = read(name)
            except (CorruptObject, ObjectMissing, StoreDenied) as error:
                self.damaged.append(str(error))
            else:
                if record is not None:
                    found.append(record)
        return found


def living_hosts(
    store: ObjectStore, fleet: FleetRecord, clock: Clock, meanwhile: Callable[[], None] = lambda: None
) -> list[HostRecord]:
    """The hosts whose heartbeat changes under observation, without leaving hosts, by name.

    Returns as soon as every host has changed its heartbeat or says that it leaves, and at the latest after the fleet's
    TTL. Records that cannot be read are logged and left out. meanwhile: called before each look.
    """
    reader = FleetReader(store, fleet)
    hosts = {host.incarnation: host for host in reader.hosts()}
    log_damaged(reader)
    heartbeats = Heartbeats(store, HostBeat, fleet_layout.alive, clock)
    return [hosts[name] for name in sorted(_living("hosts", heartbeats, hosts, fleet, clock, meanwhile))]


def waiting_runs(
    store: ObjectStore,
    fleet: FleetRecord,
    clock: Clock,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    without: str = "",
) -> list[WaitingRun]:
    """The last heartbeats of the processes that wait for admission and live, as `living_hosts` finds out.

    Only runs that the fleet allows count. without: an incarnation to leave out.
    """
    names = {key.removeprefix(fleet_layout.WAITING).removesuffix(".json") for key in store.list(fleet_layout.WAITING)}
    names.discard(without)
    heartbeats = Heartbeats(store, WaitingRun, fleet_layout.waiting, clock)
    found = _living("runs that wait for admission", heartbeats, names, fleet, clock, meanwhile)
    return [record for _, record in sorted(found.items()) if record is not None and fleet.allows(record.run_url)]


def _living(
    what: str,
    heartbeats: Heartbeats[HeartbeatT],
    names: Iterable[str],
    fleet: FleetRecord,
    clock: Clock,
    meanwhile: Callable[[], None],
) -> dict[str, HeartbeatT | None]:
    """The changed heartbeats by name, without processes that leave; None: changed, but unreadable."""
    unknown, living = set(names), dict[str, HeartbeatT | None]()
    then = "then those that have not are left out (host_ttl_s of the fleet)"
    waiting = Wait(f"{what} of the fleet to show that they live", clock, fleet.host_ttl_s, then)
    while True:
        meanwhile()
        for name, sign in heartbeats.look(sorted(unknown)).items():
            if sign.record is not None and sign.record.state in ("leaving", "gone"):
                unknown.remove(name)
            elif sign.changed:
                unknown.remove(name)
                living[name] = sign.record
        if not unknown or waiting.is_over:
            return living
        waiting.pause(LOOK_INTERVAL_S)


def log_damaged(reader: FleetReader) -> None:
    """Log the unreadable records, in a process that does not show `damaged` to a user."""
    for line in reader.damaged:
        log.warning("left out of the fleet: %s", line)
