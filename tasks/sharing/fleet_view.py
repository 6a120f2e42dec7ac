"""A fleet as people see it: its runs with their hosts, and its hosts with what they spent their time on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from storage.fleet.fleet_reading import FleetReader, has_left
from storage.fleet.fleet_records import AdmittedRun, HostRecord, WaitingRun
from storage.fleet.spent_records import SpentKind
from storage.stores.store import ObjectStore
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
    """kinds: what a host's time is spent on, in order. waiting: runs that wait to be admitted, by last heartbeats.

    damaged: a line for each record that cannot be read; what it says is missing above.
    """

    url: str
    runs: Sequence[RunInFleet]
    hosts: Sequence[HostInFleet]
    waiting: Sequence[WaitingRun]
    damaged: Sequence[str] = ()
    kinds: tuple[str, ...] = get_args(SpentKind)


def look_at_fleet(url: str) -> FleetView:
    """Read a whole fleet; raises LookupError if there is none, and CorruptObject for its rules."""
    store, fleet = open_fleet(url)
    reader = FleetReader(store, fleet)
    runs = [_run(store, reader, each) for each in reader.runs()]
    hosts = [_host(reader, each) for each in reader.hosts()]
    return FleetView(store.url, runs, hosts, reader.waiting(), reader.damaged)


def _run(store: ObjectStore, reader: FleetReader, run: AdmittedRun) -> RunInFleet:
    seat = reader.seat(run.id)
    host = None if seat is None else seat.host
    return RunInFleet(run.id, run.run_url, host, has_left(store, run.id), run.load, run.state_bytes, run.ranks)


def _host(reader: FleetReader, host: HostRecord) -> HostInFleet:
    spent_s = dict.fromkeys(get_args(SpentKind), 0.0)
    for record in reader.spent(host.incarnation):
        for entry in record.entries:
            spent_s[entry.kind] += entry.seconds
    beat = reader.beat(host.incarnation)
    state = "unknown" if beat is None else beat.state
    return HostInFleet(host.incarnation, host.machine, host.devices, state, spent_s)
