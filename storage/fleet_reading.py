"""Reads a fleet without taking part in it: its runs, its hosts, and which of these live.

A host keeps what it has seen between two looks (`tasks/sharing/seating.py`); this is for commands and tasks, which look
once.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from storage import fleet_layout, records
from storage.clock import Clock
from storage.fleet_records import AdmittedRun, FleetRecord, HostBeat, HostRecord, SpentRecord, WaitingRun
from storage.liveness import Heartbeat, Heartbeats
from storage.records import AnyRecord
from storage.run import exists
from storage.store import CorruptObject, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)
LOOK_INTERVAL_S = 1.0
Found = TypeVar("Found", bound=AnyRecord)
Beat = TypeVar("Beat", bound=Heartbeat)


def run_ids(store: ObjectStore) -> list[str]:
    """The ids of all runs that were ever admitted, in order."""
    return sorted({key.removeprefix(fleet_layout.RUNS).partition("/")[0] for key in store.list(fleet_layout.RUNS)})


def read_run(store: ObjectStore, run_id: str) -> AdmittedRun:
    """The record that admits a run; raises ObjectMissing and CorruptObject."""
    return records.read(store, AdmittedRun, fleet_layout.admitted(run_id))


def has_left(store: ObjectStore, run_id: str) -> bool:
    """Whether a run has left the fleet for good."""
    return exists(store, fleet_layout.left(run_id))


def read_hosts(store: ObjectStore) -> list[HostRecord]:
    """All incarnations of hosts that the fleet ever had; raises CorruptObject."""
    return [records.read(store, HostRecord, key) for key in store.list(fleet_layout.HOSTS)]


def last_beat(store: ObjectStore, incarnation: str) -> HostBeat | None:
    """The last heartbeat of a host; None if there is none, or if it cannot be read."""
    return next(readable(store, HostBeat, [fleet_layout.alive(incarnation)]), None)


def read_spent(store: ObjectStore, incarnation: str) -> list[SpentRecord]:
    """What a host spent, in order; raises CorruptObject."""
    return [records.read(store, SpentRecord, key) for key in store.list(fleet_layout.spent_by(incarnation))]


def living_hosts(
    store: ObjectStore, fleet: FleetRecord, clock: Clock, meanwhile: Callable[[], None] = lambda: None
) -> list[HostRecord]:
    """The hosts whose heartbeat is seen to change, without those that leave, by name.

    It takes until the heartbeat of every host that does not say that it ends has changed, and at most the fleet's TTL.
    Records that cannot be read are logged and left out. meanwhile: called before each look.
    """
    hosts = {host.incarnation: host for host in readable(store, HostRecord, store.list(fleet_layout.HOSTS))}
    heartbeats = Heartbeats(store, HostBeat, fleet_layout.alive, clock)
    return [hosts[name] for name in sorted(_living(heartbeats, hosts, fleet, clock, meanwhile))]


def waiting_runs(
    store: ObjectStore,
    fleet: FleetRecord,
    clock: Clock,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    without: str = "",
) -> list[WaitingRun]:
    """The last heartbeats of the processes that are seen to wait, but that of one incarnation; as `living_hosts`."""
    names = {key.removeprefix(fleet_layout.WAITING).removesuffix(".json") for key in store.list(fleet_layout.WAITING)}
    names.discard(without)
    heartbeats = Heartbeats(store, WaitingRun, fleet_layout.waiting, clock)
    found = _living(heartbeats, names, fleet, clock, meanwhile)
    return [record for _, record in sorted(found.items()) if record is not None]


def _living(
    heartbeats: Heartbeats[Beat],
    names: Iterable[str],
    fleet: FleetRecord,
    clock: Clock,
    meanwhile: Callable[[], None],
) -> dict[str, Beat | None]:
    """The last heartbeat of each that is seen to change and does not say that it ends; None: it cannot be read."""
    unknown, living = set(names), dict[str, Beat | None]()
    until_s = clock.monotonic() + fleet.host_ttl_s
    while True:
        meanwhile()
        for name, sign in heartbeats.look(sorted(unknown)).items():
            if sign.record is not None and sign.record.state in ("leaving", "gone"):
                unknown.remove(name)
            elif sign.changed:
                unknown.remove(name)
                living[name] = sign.record
        if not unknown or clock.monotonic() >= until_s:
            return living
        clock.sleep(min(LOOK_INTERVAL_S, fleet.host_ttl_s))


def readable(store: ObjectStore, kind: type[Found], keys: Iterable[str]) -> Iterator[Found]:
    """The records at these keys; those that are missing or corrupt are logged and left out."""
    for key in keys:
        try:
            yield records.read(store, kind, key)
        except (CorruptObject, ObjectMissing) as error:
            log.warning("%s: left out: %s", store.url, error)
