"""The runs seated on a host: reads the fleet's records, and takes the free seats that placement gives the host."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from storage.clock import Clock
from storage.fleet import fleet_layout
from storage.fleet.fleet_reading import read_allowed_run
from storage.fleet.fleet_records import AdmittedRun, FleetRecord, HostBeat, HostRecord, SeatRecord, read_record
from storage.fleet.seats import read_seat, take_seat
from storage.journal.liveness import Heartbeats, SeenHeartbeat
from storage.records.run import exists
from storage.stores.store import CorruptObject, ObjectStore
from tasks.sharing.seat_placement import HostRoom, place

log = logging.getLogger(__name__)
# A host silent for FORGOTTEN_TTLS times the TTL is not looked at again until the host takes a seat.
FORGOTTEN_TTLS = 10.0
Found = TypeVar("Found")


class Seating:
    """The runs, seats and hosts of a fleet, as seen by one incarnation of a host."""

    def __init__(self, store: ObjectStore, fleet: FleetRecord, me: HostRecord, clock: Clock) -> None:
        self._store = store
        self._fleet = fleet
        self._me = me
        self._heartbeats = Heartbeats(store, HostBeat, fleet_layout.alive, clock, parallel_reads=1)
        self._admitted: dict[str, AdmittedRun] = {}
        # Runs that have left, and runs with an unreadable seat record.
        self._left: set[str] = set()
        self._seats: dict[str, SeatRecord] = {}
        self._hosts: dict[str, HostRecord] = {}
        self._signs: dict[str, SeenHeartbeat[HostBeat]] = {}
        self._unreadable: set[str] = set()
        self._forgotten: set[str] = set()

    @property
    def seated(self) -> dict[str, AdmittedRun]:
        """The runs seated on this host, by id, as of the last look."""
        return {run.id: run for run in self._seated_on(self._me.incarnation)}

    def is_mine(self, run: str) -> bool:
        """Whether this host still has the run's seat; at most one request."""
        seat = self._seats[run]
        return seat.host == self._me.incarnation and not exists(self._store, fleet_layout.seat(run, seat.epoch + 1))

    def look(self) -> None:
        """Read the new records of the fleet, and take the free seats that placement gives this host.

        Costs two LISTs, one GET per new record, and one GET per remembered host. Raises the errors of the store;
        corrupt records are logged and left out.
        """
        self._read_runs(self._store.list(fleet_layout.RUNS))
        self._read_hosts(self._store.list(fleet_layout.HOSTS))
        self._look_at_hosts()
        self._take_seats()

    def _read_runs(self, keys: Iterable[str]) -> None:
        newest: dict[str, int] = {}
        for key in keys:
            run = key.removeprefix(fleet_layout.RUNS).partition("/")[0]
            address = fleet_layout.seat_address(key)
            if address is not None:
                newest[run] = max(newest.get(run, 0), address[1])
            elif key == fleet_layout.left(run):
                self._left.add(run)
            elif key == fleet_layout.admitted(run) and run not in self._admitted:
                admitted = self._read(key, partial(read_allowed_run, self._store, self._fleet, run))
                if admitted is not None:
                    self._admitted[run] = admitted
        for run, epoch in newest.items():
            if run not in self._seats or self._seats[run].epoch < epoch:
                key = fleet_layout.seat(run, epoch)
                seat = self._read(key, partial(read_seat, self._store, run, epoch))
                if seat is not None:
                    self._seats[run] = seat
                    self._forgotten.discard(seat.host)
                else:
                    # Which host has the seat cannot be known, so this one neither trains the run nor takes its seat.
                    self._left.add(run)

    def _read_hosts(self, keys: Iterable[str]) -> None:
        for key in keys:
            name = key.removeprefix(fleet_layout.HOSTS).removesuffix(".json")
            if name not in self._hosts:
                found = self._read(key, partial(read_record, self._store, HostRecord, key))
                if found is not None:
                    self._hosts[name] = found

    def _read(self, key: str, read: Callable[[], Found]) -> Found | None:
        """The result of `read`; None if the object is corrupt, which is logged once. Corrupt objects never change."""
        if key in self._unreadable:
            return None
        try:
            return read()
        except CorruptObject as error:
            log.warning("%s: left out: %s", self._store.url, error)
            self._unreadable.add(key)
            return None

    def _look_at_hosts(self) -> None:
        holders = {seat.host for run, seat in self._seats.items() if run not in self._left}
        names = sorted((holders | self._hosts.keys()) - self._forgotten - {self._me.incarnation})
        self._signs.update(self._heartbeats.look(names))
        for name in names:
            sign = self._signs[name]
            ended = sign.record is not None and sign.record.state == "gone"
            if ended or sign.silent_s >= FORGOTTEN_TTLS * self._fleet.host_ttl_s:
                self._forgotten.add(name)

    def _is_lost(self, host: str) -> bool:
        """Whether the seats of `host` are free, by the heartbeats that this host has seen."""
        if host == self._me.incarnation:
            return False
        sign = self._signs.get(host)
        return sign is not None and (host in self._forgotten or sign.lost(self._fleet.host_ttl_s))

    def _takes_seats(self, host: str) -> bool:
        sign = self._signs.get(host)
        leaves = sign is not None and sign.record is not None and sign.record.state == "leaving"
        return not leaves and not self._is_lost(host)

    def _seated_on(self, host: str) -> list[AdmittedRun]:
        return [
            self._admitted[run]
            for run, seat in self._seats.items()
            if seat.host == host and run in self._admitted and run not in self._left
        ]

    def _free(self) -> Mapping[str, AdmittedRun]:
        """The runs that no living host trains, by id."""
        return {
            run: record
            for run, record in self._admitted.items()
            if run not in self._left and (run not in self._seats or self._is_lost(self._seats[run].host))
        }

    def _take_seats(self) -> None:
        """Take the free seats that placement gives this host; the store decides a race for a seat."""
        free = self._free()
        rooms = [
            HostRoom(
                host=name,
                memory_bytes=record.memory_bytes,
                devices=record.devices,
                seated=tuple(self._seated_on(name)),
            )
            for name, record in self._hosts.items()
            if self._takes_seats(name)
        ]
        for run, host in place(free.values(), rooms).items():
            if host == self._me.incarnation:
                epoch = self._seats[run].epoch if run in self._seats else 0
                if take_seat(self._store, run, epoch, host):
                    self._seats[run] = read_seat(self._store, run, epoch + 1)
