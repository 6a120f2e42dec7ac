"""SessionConfig: the slot, names and intervals of one incarnation. It knows nothing of the run's configuration."""

from dataclasses import dataclass
from typing import Literal

from storage.journal.journal import PARALLEL_READS


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Intervals and names of one incarnation; see RolloutConfig for their meaning.

    slot: a slot of the plan, or a number beyond the plan's slots for a member without an assignment of its own.
    started_at_s: since when the machine is paid for, on its wall clock; None: since now.
    usd_per_hour: the machine's price, if it differs from its pool's.
    time_limit_s: the member leaves after this long as if it had been given notice, but without an error (see also
        `enough` of Session); None: never. Such a member need not stay for its slot's responses; others finish them.
    standing: when it holds nothing it leaves as soon as `enough` of Session returns True, and not before; meanwhile it
        looks for work. Another iteration needs such a member, so it need not stay for its slot's responses.
    objective: with "gpu_seconds" it takes nothing from living members, and leaves as soon as no response is free.
    cut_share: when this share of its responses has ended, it hands the rest to members with room and leaves; None:
        never.
    engine_restarts_max: how often a dead engine is restarted before the incarnation gives up.
    parallel_reads: the most read requests in flight at once; 1 makes them one after another.
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
    standing: bool = False
    objective: Literal["makespan", "gpu_seconds"] = "makespan"
    cut_share: float | None = None
    engine_restarts_max: int = 0
    parallel_reads: int = PARALLEL_READS
