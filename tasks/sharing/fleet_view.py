"""A fleet as people see it: its runs with their hosts, and its hosts with what they spent their time on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from storage import fleet_layout
from storage.fleet_reading import has_left, last_beat, read_hosts, read_run, read_spent, readable, run_ids
from storage.fleet_records import HostRecord, SpentKind, WaitingRun
from storage.seats import newest_seat
from storage.store import ObjectStore
from tasks.sharing.membership import open_fleet


@dataclass(frozen=True)
class RunInFleet:
    """host: the incarnation that has its seat; None: no host has taken it. left: it has left for good."""

    id: str
    run_url: str
    host: str | None
    left: bool
    load: float
    state_bytes: int
    ranks: int


@dataclass(frozen=True)
class HostInFleet:
    """state: as in its last heartbeat, which may be old. spent_s: seconds by kind, as far as they are recorded."""

    incarnation: str
    machine: str
    devices: int
    state: str
    spent_s: Mapping[str, float]


@dataclass(frozen=True)
class FleetView:
    """kinds: what a host's time is spent on, in order. waiting: runs that wait to be admitted, by last heartbeats."""

    url: str
    runs: Sequence[RunInFleet]
    hosts: Sequence[HostInFleet]
    waiting: Sequence[WaitingRun]
    kinds: tuple[str, ...] = get_args(SpentKind)


def look_at_fleet(url: str) -> FleetView:
    """Read a whole fleet; raises LookupError if there is none, and CorruptObject."""
    store, _ = open_fleet(url)
    hosts = [_host(store, each) for each in read_hosts(store)]
    heartbeats = readable(store, WaitingRun, store.list(fleet_layout.WAITING))
    waiting = [each for each in heartbeats if each.state == "waiting"]
    return FleetView(store.url, [_run(store, each) for each in run_ids(store)], hosts, waiting)


def _run(store: ObjectStore, run_id: str) -> RunInFleet:
    run = read_run(store, run_id)
    seat = newest_seat(store, run_id)
    left = has_left(store, run_id)
    host = None if seat is None else seat.host
    return RunInFleet(run.id, run.run_url, host, left, run.load, run.state_bytes, run.ranks)


def _host(store: ObjectStore, host: HostRecord) -> HostInFleet:
    spent_s = dict.fromkeys(get_args(SpentKind), 0.0)
    for record in read_spent(store, host.incarnation):
        for entry in record.entries:
            spent_s[entry.kind] += entry.seconds
    beat = last_beat(store, host.incarnation)
    state = "unknown" if beat is None else beat.state
    return HostInFleet(host.incarnation, host.machine, host.devices, state, spent_s)
