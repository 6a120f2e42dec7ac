"""A fleet as people see it: its runs with their hosts, and its hosts with what they spent their time on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from storage import fleet_layout, records
from storage.fleet_records import AdmittedRun, HostBeat, HostRecord, SpentKind, SpentRecord
from storage.run import exists
from storage.seats import newest_seat
from storage.store import CorruptObject, ObjectMissing, ObjectStore
from tasks.sharing.fleet_admission import open_fleet


@dataclass(frozen=True)
class RunInFleet:
    """host: the incarnation that has its seat; None: no host has taken it. left: it has left for good."""

    id: str
    run_url: str
    host: str | None
    left: bool
    load: float
    state_bytes: int


@dataclass(frozen=True)
class HostInFleet:
    """state: as in its last heartbeat, which may be old. spent_s: seconds by kind, as far as they are recorded."""

    incarnation: str
    machine: str
    state: str
    spent_s: Mapping[str, float]


@dataclass(frozen=True)
class FleetView:
    """kinds: what a host's time is spent on, in order."""

    url: str
    runs: Sequence[RunInFleet]
    hosts: Sequence[HostInFleet]
    kinds: tuple[str, ...] = get_args(SpentKind)


def look_at_fleet(url: str) -> FleetView:
    """Read a whole fleet; raises LookupError if there is none, and CorruptObject."""
    store, _ = open_fleet(url)
    ids = sorted({key.removeprefix(fleet_layout.RUNS).partition("/")[0] for key in store.list(fleet_layout.RUNS)})
    hosts = [records.read(store, HostRecord, key) for key in store.list(fleet_layout.HOSTS)]
    return FleetView(store.url, [_run(store, each) for each in ids], [_host(store, each) for each in hosts])


def _run(store: ObjectStore, run_id: str) -> RunInFleet:
    run = records.read(store, AdmittedRun, fleet_layout.admitted(run_id))
    seat = newest_seat(store, run_id)
    left = exists(store, fleet_layout.left(run_id))
    return RunInFleet(run.id, run.run_url, None if seat is None else seat.host, left, run.load, run.state_bytes)


def _host(store: ObjectStore, host: HostRecord) -> HostInFleet:
    spent_s = dict.fromkeys(get_args(SpentKind), 0.0)
    for key in store.list(fleet_layout.spent_by(host.incarnation)):
        for entry in records.read(store, SpentRecord, key).entries:
            spent_s[entry.kind] += entry.seconds
    try:
        state: str = records.read(store, HostBeat, fleet_layout.alive(host.incarnation)).state
    except (ObjectMissing, CorruptObject):
        state = "unknown"
    return HostInFleet(host.incarnation, host.machine, state, spent_s)
