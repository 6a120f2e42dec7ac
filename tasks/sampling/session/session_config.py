"""What one incarnation is told: its slot, its names, its intervals. Knows nothing of the run's configuration."""

from dataclasses import dataclass
from typing import Literal

from storage.journal import PARALLEL_READS


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Intervals and names of one incarnation; see RolloutConfig for their meaning.

    slot: of the plan, or beyond: a member that joined from outside and has no work of its own.
    started_at_s: since when its machine is paid for, on this machine's wall clock; None: since now.
    usd_per_hour: its price, if it is not its pool's.
    time_limit_s: after so long it leaves as if it had been given notice, but without an error (see also `enough` of
        Session); None: never. Whoever has one is not waited for: others finish what its slot began with.
    objective: with "gpu_seconds" it takes nothing from the living, and leaves as soon as nothing is free.
    cut_share: when so much of its work has ended, it hands the rest to members with room, and leaves; None: never.
    background: housekeeping in a thread of its own; without, all storage is read and written between decode steps.
    engine_restarts_max: how often an engine that died is started again before the incarnation gives up.
    parallel_reads: requests under way at once when much is to be read; 1 makes them one after another.
    """

    slot: int
    pool: str
    host: str
    pid: int
    started_at_s: float | None = None
    usd_per_hour: float | None = None
    flush_interval_s: float
    heartbeat_interval_s: float
    claim_ttl_s: float
    idle_timeout_s: float
    time_limit_s: float | None = None
    objective: Literal["makespan", "gpu_seconds"] = "makespan"
    cut_share: float | None = None
    engine_restarts_max: int = 0
    background: bool = True
    parallel_reads: int = PARALLEL_READS
