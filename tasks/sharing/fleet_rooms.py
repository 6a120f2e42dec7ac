"""The runs seated on the living hosts of a fleet, and the seconds of a switch: read once, without taking part."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from storage.clock import Clock
from storage.fleet.fleet_reading import FleetReader, has_left, living_hosts, log_damaged
from storage.fleet.fleet_records import AdmittedRun, FleetRecord
from storage.stores.store import ObjectStore
from tasks.sharing.seat_placement import HostRoom, place

# The number of a host's last records from which the seconds of a switch are measured.
RECORDS_READ = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRooms:
    """The living hosts of a fleet with the runs of each.

    Attributes:
        rooms: The living hosts that take seats, each with its seated runs and the runs that placement would add.
        runs: All runs that have not left, by id.
        machines: The machine names of the living hosts, by incarnation.
        switch_s: The median seconds per phase of restoring and parking a state, on the living hosts; None without any
            recorded phase.
    """

    rooms: tuple[HostRoom, ...]
    runs: dict[str, AdmittedRun]
    machines: dict[str, str]
    switch_s: float | None

    def rooms_for(self, newcomer: AdmittedRun) -> tuple[HostRoom, ...]:
        """The rooms; if no host lives, a single possible host with memory for all runs of the newcomer's ranks."""
        if self.rooms:
            return self.rooms
        runs = tuple(run for run in self.runs.values() if run.ranks == newcomer.ranks)
        memory_bytes = sum(run.state_bytes for run in (newcomer, *runs))
        return (HostRoom(host="", memory_bytes=memory_bytes, devices=newcomer.ranks, seated=runs),)


def look_at_rooms(
    store: ObjectStore,
    fleet: FleetRecord,
    clock: Clock,
    *,
    without: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> FleetRooms:
    """Look at a fleet as if the run with the id `without` were absent.

    Takes as long as `living_hosts`. Records that cannot be read are logged and left out. Raises the store's errors.
    """
    reader = FleetReader(store, fleet)
    runs = {run.id: run for run in reader.runs() if run.id != without and not has_left(store, run.id)}
    hosts = living_hosts(store, fleet, clock, meanwhile)
    rooms = {
        host.incarnation: HostRoom(host=host.incarnation, memory_bytes=host.memory_bytes, devices=host.devices)
        for host in hosts
    }
    waiting = []
    for run in runs.values():
        seat = reader.seat(run.id)
        if seat is not None and seat.host in rooms:
            rooms[seat.host] = _with(rooms[seat.host], run)
        else:
            waiting.append(run)
    for run_id, host in place(waiting, tuple(rooms.values())).items():
        rooms[host] = _with(rooms[host], runs[run_id])
    switch_s = _switch_s(reader, rooms)
    log_damaged(reader)
    return FleetRooms(
        rooms=tuple(rooms.values()),
        runs=runs,
        machines={host.incarnation: host.machine for host in hosts},
        switch_s=switch_s,
    )


def _with(room: HostRoom, run: AdmittedRun) -> HostRoom:
    return replace(room, seated=(*room.seated, run))


def _switch_s(reader: FleetReader, hosts: Iterable[str]) -> float | None:
    seconds: dict[tuple[str, str | None, int | None], float] = {}
    for host in hosts:
        for record in reader.spent(host, last=RECORDS_READ):
            for entry in record.entries:
                if entry.kind in ("switch", "park"):
                    phase = (host, entry.run, entry.iteration)
                    seconds[phase] = seconds.get(phase, 0.0) + entry.seconds
    return statistics.median(seconds.values()) if seconds else None
