"""The interface of a host to training: one worker for each run that is seated on the host.

A worker has a process for each device of the host; the processes are ranks that train together. The host decides which
run has the devices. Ordered to train, a worker restores the run's state, trains one phase, parks the state in host
memory, frees the devices, and publishes from host memory. Ordered to prefetch, a worker reads the state into host
memory ahead of a phase, without touching the devices.
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
    """How a worker got its state.

    Attributes:
        tier: The source of the state.
        seconds: Seconds of the read.
        num_bytes: Bytes of tensors.
        ahead: Read into host memory ahead of a phase; else read onto the device.
    """

    tier: Tier
    seconds: float
    num_bytes: int
    ahead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """The present state of a worker; with several ranks, the state of the rank furthest behind.

    Attributes:
        phase: "absent": no process. "prefetching": from `prefetch` until the state is in host memory. "restoring": from
            `begin` until the state is on the device. "replaying": training again on the recorded batches of the
            `replays` iterations since the checkpoint. "waiting": for groups that are not recorded yet. "parked": the
            phase is published, or a different host has published first, or the prefetch is over. "failed": a process
            has ended or given up the phase, and all processes have ended.
        iteration: The iteration of the present or last phase.
        digest: The digest of the stored state that equals the resident state; None without a resident state.
        message: The reason of "failed".
        lasting: Every attempt at the phase would fail alike.
        bytes_held: The bytes of the resident state.
        restored: How the state for the last order was restored; None until then.
        replays: The number of iterations trained again.
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
    """The workers of a host. Only the host's thread calls the methods. No call waits for a worker."""

    def begin(self, run: AdmittedRun, iteration: int) -> None:
        """Wake or start the run's worker, and let the worker train a phase.

        The host calls `begin` only while no worker has the device, and the run's worker does not prefetch. From the
        call on, the worker has the device.
        """
        ...

    def prefetch(self, run: AdmittedRun, iteration: int) -> None:
        """Let the idle worker of the run read the state for a phase into host memory.

        After a failed read the worker is "parked" without a state, or "failed".
        """
        ...

    def state(self, run_id: str) -> WorkerState:
        """The state of the run's worker; "absent" without a worker."""
        ...

    def evict(self, run_id: str) -> None:
        """End the run's worker, if any, and drop the run's state in host memory.

        The host calls `evict` when the run's seat is lost, when the run has left, when memory is needed, and when the
        host ends; never while the worker has the device.
        """
        ...

    def kill(self, run_id: str) -> None:
        """End the run's worker at once, even at work; afterwards the worker is "failed" or "absent"."""
        ...


class BackfillMember(Protocol):
    """A member that generates on the host's device, in a separate process. Only the host's thread calls the methods."""

    @property
    def is_running(self) -> bool:
        """Whether the member's process has been started and has not ended."""
        ...

    def start(self, run_url: str) -> None:
        """Let a member generate for a run; the host calls `start` only while the device is free."""
        ...

    def notice(self) -> None:
        """Tell the member to flush its tokens and end. Returns without waiting for the end."""
        ...

    def kill(self) -> None:
        """End the member at once, and return when the process has ended."""
        ...
