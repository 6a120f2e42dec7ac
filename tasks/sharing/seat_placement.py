"""Which living host takes which free seat: pure, so that every host computes the same from the same records.

Two hosts that see different records may both want a seat. Creating its next epoch decides; nothing here has to.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.fleet.fleet_records import AdmittedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """A living host that takes seats, and the runs that are seated on it. devices: as in `HostRecord`."""

    host: str
    memory_bytes: int
    devices: int = 1
    seated: tuple[AdmittedRun, ...] = ()

    def can_train(self, run: AdmittedRun) -> bool:
        """Whether the run has a rank for each device, and memory holds its state alone."""
        return run.ranks == self.devices and run.state_bytes <= self.memory_bytes

    def holds(self, runs: Iterable[AdmittedRun]) -> bool:
        """Whether memory holds the states of all these runs, so that every phase can find its state there."""
        return sum(run.state_bytes for run in runs) <= self.memory_bytes


def load(runs: Iterable[AdmittedRun]) -> float:
    """The part of one trainer's time that these runs are expected to need."""
    return sum(run.load for run in runs)


def place(free: Iterable[AdmittedRun], rooms: Sequence[HostRoom]) -> Mapping[str, str]:
    """Returns the host of each run whose seat is free, by run id; a run that no host can train is left out.

    A run goes to the host for which it was admitted, if that is among the rooms. Then the run with the greatest load is
    placed first, each on the host with the least expected load. Hosts whose memory holds its state beside the states
    that are there come before those that would have to drop one. A host that cannot train it is never chosen. Ties are
    decided by name.
    """
    seated = {room.host: list(room.seated) for room in rooms}
    placed: dict[str, str] = {}
    able = {run: [room for room in rooms if room.can_train(run)] for run in free}
    for run in sorted(able, key=lambda one: (not _expecting(one, able[one]), -one.load, one.id)):
        if choice := _expecting(run, able[run]) or able[run]:
            chosen = min(choice, key=lambda room: (_is_crowded(run, room, seated), load(seated[room.host]), room.host))
            seated[chosen.host].append(run)
            placed[run.id] = chosen.host
    return placed


def _expecting(run: AdmittedRun, able: Iterable[HostRoom]) -> list[HostRoom]:
    """Of these hosts the one for which the run was admitted, if there is one."""
    return [] if run.predicted is None else [room for room in able if room.host == run.predicted.host]


def _is_crowded(run: AdmittedRun, room: HostRoom, seated: Mapping[str, Sequence[AdmittedRun]]) -> bool:
    """Whether the states of all runs together exceed the host's memory."""
    return sum(one.state_bytes for one in (run, *seated[room.host])) > room.memory_bytes
