"""A fleet as people see it: each run with its host, and each host with its seconds by kind."""

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
    """A run of a fleet.

    Attributes:
        id: The run's id in the fleet.
        run_url: The run's url.
        host: The incarnation with the run's seat; None if no host has taken the seat.
        left: The run has left the fleet for good.
        load: The part of a trainer's time that the run needs.
        state_bytes: The size of the resident state in host memory.
        ranks: Processes that train the run together.
    """

    id: str
    run_url: str
    host: str | None
    left: bool
    load: float
    state_bytes: int
    ranks: int


@dataclass(frozen=True)
class HostInFleet:
    """A host of a fleet.

    Attributes:
        incarnation: The host's incarnation.
        machine: The name of the machine.
        devices: The number of devices.
        state: The state in the last heartbeat, however old; "unknown" without a readable heartbeat.
        spent_s: Recorded seconds by kind.
    """

    incarnation: str
    machine: str
    devices: int
    state: str
    spent_s: Mapping[str, float]


@dataclass(frozen=True)
class FleetView:
    """The runs and hosts of a fleet.

    Attributes:
        url: The fleet's url.
        runs: The admitted runs.
        hosts: The hosts, living or not.
        waiting: Runs that wait to be admitted, by their last heartbeats.
        damaged: A line for each unreadable record, which is left out of the lists.
        kinds: The kinds of spent time, in order.
    """

    url: str
    runs: Sequence[RunInFleet]
    hosts: Sequence[HostInFleet]
    waiting: Sequence[WaitingRun]
    damaged: Sequence[str] = ()
    kinds: tuple[str, ...] = get_args(SpentKind)


def look_at_fleet(url: str) -> FleetView:
    """Read a whole fleet; raises LookupError if there is no fleet, and CorruptObject for unreadable rules."""
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
