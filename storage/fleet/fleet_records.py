"""The records of a fleet: rules, runs, seats and hosts (docs/format.md 11); the time of hosts: spent_records.py.

Only `DueRecord` lies in a run's directory; all other records lie below the fleet's root.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Protocol, TypeVar

from pydantic import Field

from storage.fleet import fleet_layout
from storage.package_version import VERSION
from storage.records import records
from storage.records.records import STRICT, AnyRecord, nonce
from storage.stores.connect import is_below
from storage.stores.store import CorruptObject, ObjectStore

GIB = 1 << 30
# Of a record; the largest are those of what a host spent in a minute.
RECORD_BYTES_MAX = 1 << 22
# What a record of another team may hold, so that all can calculate with it, and no name leads to another key.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\z")]
Text = Annotated[str, Field(max_length=4096)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e12, le=1e12)]
Amount = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e12)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True, kw_only=True)
class FleetRecord:
    """fleet.json: the rules for every host of a fleet.

    Attributes:
        run_prefixes: places below which a run's url must lie for admission.
        host_ttl_s: a host silent for this time, on the observer's monotonic clock, has lost its seats; choose several
            times the limit of a request.
        slowdown_max: largest factor by which sharing may lengthen a run's cycle, against the run alone.
        patience_s: seconds of waiting after which a run may no longer be passed by runs that fit.
    """

    KIND: ClassVar[str] = "fleet"
    __pydantic_config__ = STRICT
    run_prefixes: tuple[str, ...]
    host_ttl_s: float
    created_at_s: float
    slowdown_max: float = 1.1
    patience_s: float = 3600.0
    nonce: str = field(default_factory=nonce)

    def __post_init__(self) -> None:
        _check_above("host_ttl_s", self.host_ttl_s, 0)
        _check_above("slowdown_max", self.slowdown_max, 1)
        if not self.patience_s >= 0:
            raise ValueError(f"patience_s: value {self.patience_s}; allowed: 0 or more")

    def allows(self, run_url: str) -> bool:
        """True if the url's place lies below the place of a prefix."""
        return bool(self._prefixes_of(run_url))

    def name_for(self, reader_url: str, run: "AdmittedRun") -> str:
        """The name of a run for readers at `reader_url`: the run's url if a prefix covers both urls, else the run's id.

        Urls below foreign prefixes are shown by id only, because the run belongs to another team.
        """
        return self.name_for_url(reader_url, run.run_url)

    def name_for_url(self, reader_url: str, run_url: str) -> str:
        """`name_for` a run that is not admitted yet."""
        is_near = self._prefixes_of(reader_url) & self._prefixes_of(run_url)
        return run_url if is_near else fleet_layout.run_id(run_url)

    def _prefixes_of(self, run_url: str) -> set[str]:
        return {prefix for prefix in self.run_prefixes if is_below(run_url, prefix)}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What admission expected: the host of the run, and the cycles of all runs there.

    Attributes:
        host: the incarnation; None: no host lived.
        slowdowns: cycle with sharing / cycle alone, by run id.
    """

    __pydantic_config__ = STRICT
    host: Name | None
    slowdowns: Mapping[Name, Amount] = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class AdmittedRun:
    """run.json of a run in a fleet.

    Attributes:
        id: `fleet_layout.run_id(run_url)`.
        phase_s: expected seconds of a phase.
        cycle_s: expected seconds from one phase to the next if the run had a trainer of its own.
        state_bytes: size of the run's resident state in host memory.
        share: weight of the run's waiting.
        rollouts_ahead: number of iterations that rollout runs ahead of training.
        rollout_gpus, trainer_gpus: GPUs of all rollout pools, and of a trainer of its own; 0: none.
        ranks: number of processes that train the run together, one on each device of a host.
        rollout_cv, phase_cv: coefficients of variation of the seconds of rollouts and phases; None: unknown.
        predicted: result of the simulation at admission; None before the simulation.
    """

    KIND: ClassVar[str] = "admitted run"
    __pydantic_config__ = STRICT
    id: Name
    run_url: Text
    phase_s: Amount
    cycle_s: Amount
    state_bytes: Count
    admitted_at_s: Number
    share: Amount = 1.0
    rollouts_ahead: Count = 0
    rollout_gpus: Count = 0
    trainer_gpus: Count = 0
    ranks: Count = 1
    rollout_cv: Amount | None = None
    phase_cv: Amount | None = None
    predicted: Prediction | None = None
    nonce: str = field(default_factory=nonce)

    def __post_init__(self) -> None:
        _check_above("phase_s", self.phase_s, 0)
        _check_above("cycle_s", self.cycle_s, 0)
        _check_above("share", self.share, 0)
        for name in ("state_bytes", "rollouts_ahead", "rollout_gpus", "trainer_gpus", "rollout_cv", "phase_cv"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise ValueError(f"{name}: value {value}; allowed: 0 or more")
        _check_above("ranks", self.ranks, 0)

    @property
    def load(self) -> float:
        """The part of a trainer's time that the run needs."""
        return self.phase_s / self.cycle_s

    def wait_s_max(self, slowdown_max: float) -> float:
        """How many seconds a phase may wait for the trainer if no cycle may take `slowdown_max` times as long."""
        return (slowdown_max - 1) * self.cycle_s

    @property
    def key(self) -> str:
        """The key of this record in the fleet."""
        return fleet_layout.admitted(self.id)


@dataclass(frozen=True, kw_only=True)
class LeftRecord:
    """left.json: the run has left the fleet for good; `reason` in words."""

    KIND: ClassVar[str] = "left run"
    __pydantic_config__ = STRICT
    id: Name
    reason: Text
    left_at_s: Number
    nonce: str = field(default_factory=nonce)


@dataclass(frozen=True, kw_only=True)
class SeatRecord:
    """One epoch of a run's seat: from now on the incarnation `host` trains the run."""

    KIND: ClassVar[str] = "seat"
    __pydantic_config__ = STRICT
    run: Name
    epoch: Count
    host: Name
    nonce: str = field(default_factory=nonce)

    @property
    def key(self) -> str:
        """The key of this record in the fleet."""
        return fleet_layout.seat(self.run, self.epoch)


@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """An incarnation of a host.

    Attributes:
        machine: name of the machine, for people.
        memory_bytes: room for resident states.
        usd_per_hour: price of the machine; None: unknown.
        began_at_s: wall-clock seconds of the start, for people.
        disk_bytes: room for copies of states on a local disk, from hosts of an older version; 0 from this version.
        devices: number of devices, all of which a run has at a time; the host trains runs of this number of ranks.
        version: version of the package that the host runs.
    """

    KIND: ClassVar[str] = "host"
    __pydantic_config__ = STRICT
    incarnation: Name
    machine: Text
    memory_bytes: Count
    usd_per_hour: Amount | None
    began_at_s: Number
    disk_bytes: Count = 0
    devices: Count = 1
    version: Text = VERSION
    nonce: str = field(default_factory=nonce)

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: value {getattr(self, name)}; allowed: 0 or more")
        _check_above("devices", self.devices, 0)

    @property
    def key(self) -> str:
        """The key of this record in the fleet."""
        return fleet_layout.host(self.incarnation)


@dataclass(frozen=True, kw_only=True)
class HostBeat:
    """Heartbeat of a host. Hosts observe the change and the states "leaving" and "gone"; the rest is for people.

    Attributes:
        sequence: number of earlier heartbeats.
        resident, iteration: the run on the device and the iteration in training; None: none.
        lived_s: seconds since the host began, on its monotonic clock.
        state: "leaving": the host takes no seats and begins no phase; "gone": the host has ended, and its seats are
            free.
    """

    KIND: ClassVar[str] = "host heartbeat"
    __pydantic_config__ = STRICT
    incarnation: Name
    sequence: Count
    resident: Name | None
    iteration: Count | None
    lived_s: Amount
    state: Literal["idle", "training", "leaving", "gone"]

    @property
    def key(self) -> str:
        """The key of this record in the fleet."""
        return fleet_layout.alive(self.incarnation)


@dataclass(frozen=True, kw_only=True)
class WaitingRun:
    """Heartbeat of a process that waits until its run can be admitted.

    Attributes:
        incarnation: of the waiting process.
        waited_s: seconds of waiting so far, on the monotonic clock of the process.
        state: "gone" if the process waits no longer.
    """

    KIND: ClassVar[str] = "waiting run"
    __pydantic_config__ = STRICT
    incarnation: Name
    sequence: Count
    run_url: Text
    waited_s: Amount
    state: Literal["waiting", "gone"]

    @property
    def key(self) -> str:
        """The key of this record in the fleet."""
        return fleet_layout.waiting(self.incarnation)


@dataclass(frozen=True, kw_only=True)
class DueRecord:
    """due.json: the iteration's phase may begin.

    Attributes:
        groups: number of groups recorded so far.
        version: version of the package that has recorded them; only a host of an equal version trains them.
    """

    KIND: ClassVar[str] = "due"
    __pydantic_config__ = STRICT
    iteration: int
    groups: int
    version: str = VERSION


class Placed(AnyRecord, Protocol):
    """A record that knows its own key."""

    @property
    def key(self) -> str: ...


Found = TypeVar("Found", bound=Placed)


def read_record(store: ObjectStore, kind: type[Found], key: str) -> Found:
    """The record at a key of a fleet; a record is believed only about itself.

    Raises ObjectMissing, and CorruptObject also for a record that is too long or of another key.
    """
    body = store.get(key, 0, RECORD_BYTES_MAX + 1)
    if len(body) > RECORD_BYTES_MAX:
        raise CorruptObject(key, f"it is longer than {RECORD_BYTES_MAX} bytes")
    record = records.decode(kind, key, body)
    if record.key != key:
        raise CorruptObject(key, f"it is of {record.key!r}")
    return record


def _check_above(what: str, value: float, least: float) -> None:
    """Raise ValueError unless the value is finite and above `least`."""
    if not math.isfinite(value) or value <= least:
        raise ValueError(f"{what}: value {value}; allowed: finite and above {least}")
