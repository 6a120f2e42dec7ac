"""The records of a fleet: its rules, its runs and their seats, its hosts and what they spent (docs/format.md 11).

Only `DueRecord` lies in a run's directory; all others lie below the fleet's root.
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
SpentKind = Literal["switch", "wait", "train", "park", "backfill", "idle"]
# "local disk" is of hosts that keep copies of states there, as no host of this version does.
Tier = Literal["host memory", "local disk", "object store"]
# What a record of another team may hold, so that all can calculate with it, and no name leads to another key.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\z")]
Text = Annotated[str, Field(max_length=4096)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e12, le=1e12)]
Amount = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e12)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True, kw_only=True)
class FleetRecord:
    """fleet.json: what all hosts of a fleet agree on.

    run_prefixes: a run is admitted if its url lies below one of them. host_ttl_s: a host that was silent for so long,
    on the observer's monotonic clock, has lost its seats; choose several times what one request may take.
    slowdown_max: no run's cycle is to take more than so many times what it takes alone. patience_s: runs that can be
    admitted pass one that has to wait, until it has waited for so long.
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
        """Whether a run with this url may be admitted: the place that it names lies below that of a prefix."""
        return bool(self._prefixes_of(run_url))

    def name_for(self, reader_url: str, run: "AdmittedRun") -> str:
        """How a run is called before those whose urls lie where `reader_url` does: by its url below the same prefix.

        A run below other prefixes is another team's, and is called by its id.
        """
        return self.name_for_url(reader_url, run.run_url)

    def name_for_url(self, reader_url: str, run_url: str) -> str:
        """The same for a run that is not admitted yet."""
        is_near = self._prefixes_of(reader_url) & self._prefixes_of(run_url)
        return run_url if is_near else fleet_layout.run_id(run_url)

    def _prefixes_of(self, run_url: str) -> set[str]:
        return {prefix for prefix in self.run_prefixes if is_below(run_url, prefix)}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What admission expected: on which host the run trains, and how long the cycles of all runs there take then.

    host: the incarnation; None: no host lived. slowdowns: times as long as alone, by run id.
    """

    __pydantic_config__ = STRICT
    host: Name | None
    slowdowns: Mapping[Name, Amount] = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class AdmittedRun:
    """run.json of a run in a fleet.

    id: `fleet_layout.run_id(run_url)`. share: the weight of its waiting. phase_s: the expected seconds of a phase.
    cycle_s: the expected seconds from one phase to the next if the run had a trainer of its own. rollouts_ahead: how
    many iterations its rollout runs ahead of training. state_bytes: the size of its resident state in host memory.
    rollout_gpus, trainer_gpus: of all its pools for rollout, and of the trainer that it would have; 0: none. ranks: how
    many processes train it together, one on each device of a host. rollout_cv, phase_cv: coefficients of variation of
    the seconds of its rollouts and phases; None: unknown. predicted: None before admission has simulated it.
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
        """Where it lies in the fleet."""
        return fleet_layout.admitted(self.id)


@dataclass(frozen=True, kw_only=True)
class LeftRecord:
    """left.json: the run has left the fleet for good. reason: in words."""

    KIND: ClassVar[str] = "left run"
    __pydantic_config__ = STRICT
    id: Name
    reason: Text
    left_at_s: Number
    nonce: str = field(default_factory=nonce)


@dataclass(frozen=True, kw_only=True)
class SeatRecord:
    """One epoch of a run's seat: from then on this incarnation of a host trains the run."""

    KIND: ClassVar[str] = "seat"
    __pydantic_config__ = STRICT
    run: Name
    epoch: Count
    host: Name
    nonce: str = field(default_factory=nonce)

    @property
    def key(self) -> str:
        """Where it lies in the fleet."""
        return fleet_layout.seat(self.run, self.epoch)


@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """An incarnation of a host. machine: its name, for people. memory_bytes: room for resident states.

    disk_bytes: of hosts that keep copies of states on a local disk, as no host of this version does. devices: how many
    it has, all of which one run has at a time; it trains runs of as many ranks. version: of the package that it runs.
    usd_per_hour: what the machine costs; None: unknown. began_at_s: by its wall clock, for people.
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
        """Where it lies in the fleet."""
        return fleet_layout.host(self.incarnation)


@dataclass(frozen=True, kw_only=True)
class HostBeat:
    """Heartbeat of a host. Other hosts observe that it changes, "leaving" and "gone"; the rest is for people.

    sequence: how many there were before it. resident, iteration: the run on the device and what it trains; None: none.
    lived_s: seconds since the host began, on its monotonic clock. state "leaving": it takes no seats and begins no
    phase; "gone": it has ended, and its seats are free.
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
        """Where it lies in the fleet."""
        return fleet_layout.alive(self.incarnation)


@dataclass(frozen=True, kw_only=True)
class WaitingRun:
    """Heartbeat of a process that waits until its run can be admitted. incarnation: of that process.

    waited_s: how long, on its monotonic clock. state "gone": it waits no longer.
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
        """Where it lies in the fleet."""
        return fleet_layout.waiting(self.incarnation)


@dataclass(frozen=True, kw_only=True)
class SpentEntry:
    """A stretch of a host's time, from began_s to ended_s: seconds since it began, on its monotonic clock.

    kind: "switch" from the order to begin until the run trains or waits for groups; "park" while its state leaves the
    device; "backfill" while a member generates for a run; "idle" if no run has the device. run, iteration: whose phase
    it is; None if idle; a member helps no single iteration.
    """

    __pydantic_config__ = STRICT
    kind: SpentKind
    run: Name | None
    iteration: Count | None
    began_s: Amount
    ended_s: Amount

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, kw_only=True)
class RestoredState:
    """A state that a host has restored for the phase of a run's iteration. tier: from where it came.

    ahead: it was read into host memory ahead of its phase; else it came onto the device at the phase's beginning.
    seconds: what that took, by the clock of the process that did it. num_bytes: of tensors.
    """

    __pydantic_config__ = STRICT
    run: Name
    iteration: Count
    tier: Tier
    ahead: bool
    seconds: Amount
    num_bytes: Count


@dataclass(frozen=True, kw_only=True)
class SpentRecord:
    """What a host spent since its last record. Each entry begins where the one before ends; the first begins at 0.

    seated: the ids of the runs that were seated on it all that time; they share what it was idle. restored: the states
    that it has restored since the last record, in order.
    """

    KIND: ClassVar[str] = "spent"
    __pydantic_config__ = STRICT
    host: Name
    sequence: Count
    entries: tuple[SpentEntry, ...]
    seated: tuple[Name, ...]
    restored: tuple[RestoredState, ...] = ()

    @property
    def key(self) -> str:
        """Where it lies in the fleet."""
        return fleet_layout.spent(self.host, self.sequence)


@dataclass(frozen=True, kw_only=True)
class DueRecord:
    """due.json: the iteration's phase may begin. groups: how many of its groups were recorded by then.

    version: of the package that has recorded them; a host of another one does not train them.
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
    """The record at a key of a fleet, which is believed only about itself.

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
