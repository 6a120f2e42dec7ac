"""SessionConfig: the slot, names and intervals of one incarnation. It knows nothing of the run's configuration."""

from dataclasses import dataclass, field
from typing import Literal

from storage.journal.journal import PARALLEL_READS
from storage.stores.metered import Requests


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Intervals and names of one incarnation; see RolloutConfig for the intervals.

    Attributes:
        slot: a slot of the plan, or a number beyond the plan's slots for a member without an assignment.
        pool: the pool of the machine.
        host: the name of the machine.
        pid: the id of the process.
        started_at_s: the start of payment for the machine, on the machine's wall clock; None: the session's start.
        requests_before: requests to the store that are not the session's.
        usd_per_hour: the price of the machine; None: the price of the pool.
        flush_interval_s: as in RolloutConfig.
        heartbeat_interval_s: as in RolloutConfig.
        claim_ttl_s: as in RolloutConfig.
        idle_timeout_s: as in RolloutConfig.
        time_limit_s: after this time the member leaves as after a notice, but without an error (see also `enough` of
            Session); None: never. Other members then finish the slot's responses.
        standing: whether a member that holds nothing looks for work until `enough` of Session returns True. Such a
            member goes on to another iteration, and does not stay for its slot's responses.
        objective: with "gpu_seconds" the member takes nothing from living members, and leaves as soon as no response
            is free.
        cut_share: when this share of its responses has ended, the member hands the rest to members with room and
            leaves; None: never.
        engine_restarts_max: the number of restarts of a dead engine after which the incarnation gives up.
        parallel_reads: the most read requests in flight at once; 1: one after another.
    """

    slot: int
    pool: str
    host: str
    pid: int
    started_at_s: float | None = None
    requests_before: Requests = field(default_factory=Requests)
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
