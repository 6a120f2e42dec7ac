"""The records of a host's time: activities by run, and restored states (docs/format.md 11)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from storage.fleet import fleet_layout
from storage.fleet.fleet_records import Amount, Count, Name
from storage.records.records import STRICT

SpentKind = Literal["switch", "wait", "train", "park", "backfill", "idle"]
# "local disk" is of hosts that keep copies of states there, as no host of this version does.
Tier = Literal["host memory", "local disk", "object store"]


@dataclass(frozen=True, kw_only=True)
class SpentEntry:
    """A stretch of a host's time.

    Attributes:
        kind: "switch" from the order to begin until the run trains or waits for groups; "park" while its state leaves
            the device; "backfill" while a member generates for a run; "idle" if no run has the device.
        run, iteration: whose phase it is; None if idle; "backfill" has a run and no iteration.
        began_s, ended_s: seconds since the host began, on its monotonic clock.
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
    """A state that a host has restored for the phase of a run's iteration.

    Attributes:
        tier: the source of the state.
        ahead: True if the state was read into host memory ahead of its phase, False if it came onto the device at the
            beginning of the phase.
        seconds: duration of the restoring, by the clock of its process.
        num_bytes: bytes of the tensors.
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

    Attributes:
        seated: ids of the runs that were seated on the host from the last record to this one; they share its idle time.
        restored: the states that the host has restored since its last record, in order.
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
        """The key of this record in the fleet."""
        return fleet_layout.spent(self.host, self.sequence)
