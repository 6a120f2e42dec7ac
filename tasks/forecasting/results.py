"""The results of a simulated run: every iteration with its seconds, tokens and dollars, and the run's totals."""

from dataclasses import dataclass, field

from storage.records.planning_records import DecisionRecord
from storage.records.records import TRAIN_POOL
from tasks.crew_model.accounts import NO_MACHINE, WITHOUT_PROCESS


@dataclass(frozen=True, kw_only=True)
class SimulatedIteration:
    """The figures of one concluded iteration.

    Attributes:
        iteration: number of the iteration.
        duration_s: from the end of the previous training (or the beginning) to the end of the training; the durations
            of a run add up.
        rollout_s: from the plan to the end of the last response.
        train_s: computing and publishing, without waiting.
        retrain_s: part of train_s that repeats training from before the trainer's machines generated again.
        wait_train_s: as in tasks.planning.capacity.StepWaits.
        wait_remote_s: as in tasks.planning.capacity.StepWaits.
        control_s: from published weights to the next plan.
        seeding_s: seconds in which the trainer's machines generated.
        members: by pool, mean number of members with weights during decoding.
        planned: by pool, number of members in the plan.
        members_at_end: members at the end of the last response.
        tool_s: sum of the seconds for which responses waited for tools.
        tokens: tokens of the trained responses.
        tokens_decoded: all decoded tokens.
        tokens_regenerated: decoded tokens that no response kept.
        prefill_tokens: tokens of prompts and prefixes read by engines.
        moved: transfers of responses between members.
        losses: by pool, lost machines in use.
        seconds: machine seconds by pool and purpose (tasks.crew_model.accounts.PARTS); the trainer's pool is TRAIN_POOL
            of storage.records.records.
        usd: dollars by pool and purpose, also "requests" and "egress".
        gpu_s: GPU seconds of all machines.
        decisions: decisions of the plan.
    """

    iteration: int
    duration_s: float
    rollout_s: float
    train_s: float
    retrain_s: float = 0.0
    wait_train_s: float
    wait_remote_s: float
    control_s: float = 0.0
    seeding_s: float
    members: dict[str, float]
    planned: dict[str, int]
    members_at_end: int
    tool_s: float = 0.0
    tokens: int
    tokens_decoded: float
    tokens_regenerated: float
    prefill_tokens: float
    moved: int
    losses: dict[str, int]
    seconds: dict[str, dict[str, float]]
    usd: dict[str, dict[str, float]]
    gpu_s: float
    decisions: tuple[DecisionRecord, ...]

    @property
    def planned_crew(self) -> dict[str, int]:
        """Planned members by pool of the crew."""
        return {pool: count for pool, count in self.planned.items() if pool != TRAIN_POOL}

    @property
    def usd_total(self) -> float:
        return sum(sum(parts.values()) for parts in self.usd.values())

    @property
    def usd_no_machine(self) -> float:
        return sum(parts[name] for parts in self.usd.values() for name in NO_MACHINE)

    @property
    def usd_reported(self) -> float:
        """Dollars by a report's count: a machine without a process of the run costs nothing."""
        return self.usd_total - sum(parts[name] for parts in self.usd.values() for name in WITHOUT_PROCESS)

    def process_s(self, pool: str) -> float:
        """Machine seconds of a pool with a process of the run, by a report's count."""
        return sum(duration_s for part, duration_s in self.seconds[pool].items() if part not in WITHOUT_PROCESS)


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The figures of a run, without iterations that had not ended at the end of the run's time.

    Attributes:
        iterations: figures of the concluded iterations.
        stopped: the planner's reason for stopping the run early; None: the run was not stopped.
        paid_s: by pool, machine seconds from taking each machine until its loss or release.
    """

    iterations: tuple[SimulatedIteration, ...]
    stopped: str | None = None
    paid_s: dict[str, float] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return sum(each.duration_s for each in self.iterations)

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.iterations)

    @property
    def tokens_regenerated(self) -> float:
        return sum(each.tokens_regenerated for each in self.iterations)

    @property
    def usd(self) -> float:
        return sum(each.usd_total for each in self.iterations)

    @property
    def gpu_seconds(self) -> float:
        return sum(each.gpu_s for each in self.iterations)

    @property
    def tokens_per_s(self) -> float:
        """Generated and trained tokens per second; 0 for a run without iterations."""
        return self.tokens / self.duration_s if self.iterations else 0.0

    @property
    def usd_per_mtok(self) -> float:
        """Dollars per million tokens generated and trained; 0 for a run without iterations."""
        return self.usd / self.tokens * 1e6 if self.iterations else 0.0

    def last(self, count: int) -> "SimulatedRun":
        """The run's last `count` iterations alone, after machines and controllers have settled."""
        return SimulatedRun(iterations=self.iterations[-count:], stopped=self.stopped)
