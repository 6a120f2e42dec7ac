"""The interface of a host to what trains: one worker for each run that is seated on it.

A worker has a process for each device of the host; these ranks train together. The host decides which run has the
devices. A worker restores its run's state, trains one phase when it is told to, parks its state in host memory, frees
the devices, and publishes from host memory. It may be told to read its state into host memory ahead of its phase (to
prefetch it), which does not touch the devices.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from storage.fleet.fleet_records import AdmittedRun
from storage.fleet.spent_records import Tier

WorkerPhase = Literal[
    "absent",
    "prefetching",
    "restoring",
    "replaying",
    "waiting",
    "training",
    "parking",
    "publishing",
    "parked",
    "failed",
]
ON_DEVICE: frozenset[WorkerPhase] = frozenset({"restoring", "replaying", "waiting", "training", "parking"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """How a worker got its state. tier: from where. ahead: into host memory, before its phase; else onto the device."""

    tier: Tier
    seconds: float
    num_bytes: int
    ahead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What a worker does now; of several ranks, what the one that is furthest behind does.

    phase: "absent" if there is no process; "prefetching" from `prefetch` until its state is in host memory;
    "restoring" from `begin` until its state is on the device; "replaying" while it trains again what was recorded since
    its checkpoint, which is that of `replays` iterations; "waiting" for groups that are not recorded yet; "parked" if
    its phase is published, or was refused because another host's is, or if it has prefetched; "failed" if one of its
    processes ended, or gave up the phase, and then all have ended. iteration: of its present or last phase. digest: of
    the stored state that its resident state equals; None if it holds none. message: why it failed. lasting: whether
    every attempt at the phase would fail alike. bytes_held: of its resident state. restored: how it got its state for
    what it was told last; None until it has it.
    """

    phase: WorkerPhase = "absent"
    iteration: int | None = None
    digest: str | None = None
    message: str = ""
    lasting: bool = False
    bytes_held: int = 0
    restored: Restored | None = None
    replays: int = 0

    @property
    def has_device(self) -> bool:
        return self.phase in ON_DEVICE

    @property
    def is_busy(self) -> bool:
        """Whether a phase is under way, on the device or in publication."""
        return self.has_device or self.phase == "publishing"


class PhaseWorkers(Protocol):
    """The workers of a host. Only the host's thread calls it. No call waits for a worker."""

    def begin(self, run: AdmittedRun, iteration: int) -> None:
        """Wake the run's worker, or start it if there is none, and let it train this phase.

        The host calls it only while no worker has the device, and this one does not prefetch. From then on the worker
        has the device.
        """
        ...

    def prefetch(self, run: AdmittedRun, iteration: int) -> None:
        """Let the run's worker, which has no work, read the state for this phase into host memory.

        A worker that cannot read it is "parked" without a state, or "failed".
        """
        ...

    def state(self, run_id: str) -> WorkerState:
        """What the run's worker does now; "absent" if there is none."""
        ...

    def evict(self, run_id: str) -> None:
        """End the run's worker, if there is one, and drop its state in host memory.

        The host calls it when it has lost the run's seat, when the run has left, when memory is needed, and when the
        host ends; never while the worker has the device.
        """
        ...

    def kill(self, run_id: str) -> None:
        """End the run's worker at once, whatever it does; its state is "failed" or "absent" from then on."""
        ...


class BackfillMember(Protocol):
    """A member that generates on the host's device, in a process of its own. Only the host's thread calls it."""

    @property
    def is_running(self) -> bool:
        """Whether its process has been started and has not ended."""
        ...

    def start(self, run_url: str) -> None:
        """Let a member generate for a run; the host calls it only while nothing has the device."""
        ...

    def notice(self) -> None:
        """Tell it to leave: it flushes what it has, and its process ends. Does not wait for that."""
        ...

    def kill(self) -> None:
        """End it at once, and return when its process has ended."""
        ...
