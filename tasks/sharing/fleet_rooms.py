"""Which hosts of a fleet live, which runs are seated on them, and how long they switch: read once, without taking part.

A host only looks at the fleet while it serves; this is for commands, which watch the heartbeats for as long as it takes
to tell the living from the dead.
"""

import logging
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from storage import fleet_layout, records
from storage.clock import Clock
from storage.fleet_records import AdmittedRun, FleetRecord, HostBeat, HostRecord, SpentRecord
from storage.liveness import Heartbeats
from storage.records import AnyRecord
from storage.run import exists
from storage.seats import newest_seat
from storage.store import CorruptObject, ObjectMissing, ObjectStore
from tasks.sharing.seat_placement import Room, place

log = logging.getLogger(__name__)
LOOK_INTERVAL_S = 1.0
# How many of a host's last records tell how long it switches.
RECORDS_READ = 20
Found = TypeVar("Found", bound=AnyRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRooms:
    """rooms: the living hosts that take seats, with the runs that are seated there or that placement gives them.

    runs: all runs that have not left, by id. machines: names of the living hosts, by incarnation. switch_s: the median
    seconds of a phase until it trains and while its state is parked, on the living hosts; None: none has trained yet.
    """

    rooms: tuple[Room, ...]
    runs: dict[str, AdmittedRun]
    machines: dict[str, str]
    switch_s: float | None

    def rooms_for(self, newcomer: AdmittedRun) -> tuple[Room, ...]:
        """The rooms; if no host lives, one host that could come, with memory for all runs."""
        if self.rooms:
            return self.rooms
        runs = tuple(self.runs.values())
        return (Room(host="", memory_bytes=sum(run.state_bytes for run in (newcomer, *runs)), seated=runs),)


def look_at_rooms(store: ObjectStore, fleet: FleetRecord, clock: Clock, *, without: str) -> FleetRooms:
    """Look at a fleet as if the run with the id `without` were not in it.

    It takes until the heartbeat of every host that does not say that it ends has changed, and at most the fleet's TTL.
    Records that cannot be read are logged and left out. Raises what the store raises.
    """
    ids = {key.removeprefix(fleet_layout.RUNS).partition("/")[0] for key in store.list(fleet_layout.RUNS)} - {without}
    present = [each for each in sorted(ids) if not exists(store, fleet_layout.left(each))]
    admitted = _readable(store, AdmittedRun, (fleet_layout.admitted(each) for each in present))
    runs = {run.id: run for run in admitted if run.id in present and fleet.allows(run.run_url)}
    hosts = _living(store, fleet, clock)
    rooms = {
        host.incarnation: Room(host=host.incarnation, memory_bytes=host.memory_bytes, disk_bytes=host.disk_bytes)
        for host in hosts
    }
    waiting = []
    for run in runs.values():
        seat = newest_seat(store, run.id)
        if seat is not None and seat.host in rooms:
            rooms[seat.host] = _with(rooms[seat.host], run)
        else:
            waiting.append(run)
    for run_id, host in place(waiting, tuple(rooms.values())).items():
        rooms[host] = _with(rooms[host], runs[run_id])
    return FleetRooms(
        rooms=tuple(rooms.values()),
        runs=runs,
        machines={host.incarnation: host.machine for host in hosts},
        switch_s=_switch_s(store, rooms),
    )


def _with(room: Room, run: AdmittedRun) -> Room:
    return replace(room, seated=(*room.seated, run))


def _living(store: ObjectStore, fleet: FleetRecord, clock: Clock) -> list[HostRecord]:
    """The hosts whose heartbeat is seen to change within the TTL, without those that leave."""
    hosts = {host.incarnation: host for host in _readable(store, HostRecord, store.list(fleet_layout.HOSTS))}
    heartbeats = Heartbeats(store, HostBeat, fleet_layout.alive, clock)
    unknown, living = set(hosts), set[str]()
    until_s = clock.monotonic() + fleet.host_ttl_s
    while True:
        for name, sign in heartbeats.look(sorted(unknown)).items():
            if sign.record is not None and sign.record.state in ("leaving", "gone"):
                unknown.remove(name)
            elif sign.changed:
                unknown.remove(name)
                living.add(name)
        if not unknown or clock.monotonic() >= until_s:
            return [hosts[name] for name in sorted(living)]
        clock.sleep(min(LOOK_INTERVAL_S, fleet.host_ttl_s))


def _switch_s(store: ObjectStore, hosts: Iterable[str]) -> float | None:
    seconds: dict[tuple[str, str | None, int | None], float] = {}
    for host in hosts:
        for record in _readable(store, SpentRecord, store.list(fleet_layout.spent_by(host))[-RECORDS_READ:]):
            for entry in record.entries:
                if entry.kind in ("switch", "park"):
                    phase = (host, entry.run, entry.iteration)
                    seconds[phase] = seconds.get(phase, 0.0) + entry.seconds
    return statistics.median(seconds.values()) if seconds else None


def _readable(store: ObjectStore, kind: type[Found], keys: Iterable[str]) -> Iterator[Found]:
    for key in keys:
        try:
            yield records.read(store, kind, key)
        except (CorruptObject, ObjectMissing) as error:
            log.warning("%s: left out: %s", store.url, error)
