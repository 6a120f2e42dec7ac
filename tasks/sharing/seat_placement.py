"""Which living host takes which free seat: pure, so every host computes an equal placement from equal records.

Two hosts with different records may both want a seat. The creation of the seat's next epoch decides the race.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.fleet.fleet_records import AdmittedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """A living host that takes seats.

    Attributes:
        host: The incarnation.
        memory_bytes: Room for resident states.
        devices: As in `HostRecord`.
        seated: The runs that are seated on the host.
    """

    host: str
    memory_bytes: int
    devices: int = 1
    seated: tuple[AdmittedRun, ...] = ()

    def can_train(self, run: AdmittedRun) -> bool:
        """Whether the run has a rank for each device, and memory has room for the state of the run alone."""
        return run.ranks == self.devices and run.state_bytes <= self.memory_bytes

    def holds(self, runs: Iterable[AdmittedRun]) -> bool:
        """Whether memory has room for the states of all `runs`, so every phase can find its state in memory."""
        return sum(run.state_bytes for run in runs) <= self.memory_bytes


def load(runs: Iterable[AdmittedRun]) -> float:
    """The part of a trainer's time that the runs are expected to need."""
    return sum(run.load for run in runs)


def place(free: Iterable[AdmittedRun], rooms: Sequence[HostRoom]) -> Mapping[str, str]:
    """Returns the host of each run whose seat is free, by run id; a run that no host can train is left out.

    Only hosts that can train a run are considered. First, every run whose admission names one of the rooms goes to the
    named host. Then the remaining runs follow, the greatest load first, each to the host with the least expected load.
    A host with memory for the states of all its runs is preferred to a host that would have to drop a state. Ties are
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
    """The able host named in the run's admission, as a list of at most one room."""
    return [] if run.predicted is None else [room for room in able if room.host == run.predicted.host]


def _is_crowded(run: AdmittedRun, room: HostRoom, seated: Mapping[str, Sequence[AdmittedRun]]) -> bool:
    """Whether the states of all runs together exceed the host's memory."""
    return sum(one.state_bytes for one in (run, *seated[room.host])) > room.memory_bytes
