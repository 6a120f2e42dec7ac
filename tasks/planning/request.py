"""The planner's input, and the error if no plan is affordable."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from storage.errors import WrongInputError
from storage.records.planning_records import SeedingRecord
from tasks.configuration.planning import PlanningConfig
from tasks.crew_model.ownership import CrewRules
from tasks.crew_model.step_time import NOMINAL
from tasks.planning.capacity import GroupLengths, PoolCapacity, StepWaits, TrainerCapacity
from tasks.planning.makespan import response_lengths


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """All inputs of one plan.

    Attributes:
        num_generations: responses of each group.
        lengths: expected lengths of the groups' responses.
        pools: capacity of each pool of the crew, in the configuration's order.
        settings: section `planning` of the configuration.
        rules: settings by which the members divide the groups.
        keep_order: True if a member must begin groups in the order of their numbers, as dynamic sampling takes groups.
        reserved: the trainer's machines, which generate if settings.seeding allows; None: unknown.
        waits: waits of the last concluded iteration; None before the first.
        seeding: seeding of the last concluded iteration; None without seeding.
        width: (pool, members) of the last concluded iteration.
        planned_width: (pool, members) of the newest plan, whose iteration may still be running; None before the first
            plan.
        train_s: seconds of a training step without waiting; None: unknown.
        training: when training takes groups: as each group ends, in the order of group numbers, or after the last.
        past_lengths: response lengths of the last iterations, the newest first, each [groups, num_generations] tokens
            like the next iteration.
        control_s: seconds between published weights and the next plan.
        overlaps: True if the next iteration is generated while the current one is trained.
        spent_usd: cost of the run so far.
        usd_no_machine: dollars of the last iteration for scorers, requests, egress and the control plane.
        length_max: limit of a response's length in tokens.
        tool_s_per_token: seconds of waiting for tools per decoded token.
        crew: kind of crew in the configuration (rollout.crew).
    """

    num_generations: int
    lengths: GroupLengths
    pools: tuple[PoolCapacity, ...]
    settings: PlanningConfig
    rules: CrewRules
    keep_order: bool = False
    reserved: TrainerCapacity | None = None
    waits: StepWaits | None = None
    seeding: SeedingRecord | None = None
    width: tuple[tuple[str, int], ...] = ()
    planned_width: tuple[tuple[str, int], ...] | None = None
    train_s: float | None = None
    training: Literal["as_ended", "in_order", "at_end"] = "as_ended"
    past_lengths: tuple[npt.NDArray[np.float64], ...] = ()
    control_s: float = 0.0
    overlaps: bool = False
    spent_usd: float = 0.0
    usd_no_machine: float = 0.0
    length_max: float = math.inf
    tool_s_per_token: float = 0.0
    crew: Literal["iteration", "standing"] = "iteration"

    @property
    def measured(self) -> bool:
        """Whether seconds and dollars can be predicted: every usable pool has a measured step time."""
        offered = [pool for pool in self.pools if pool.count_max]
        if not offered and self.reserved is not None:
            return self.reserved.step_time is not NOMINAL
        return all(pool.measured for pool in offered)

    @property
    def knows_lengths(self) -> bool:
        """True if the predictor expects different lengths of different groups."""
        return self.lengths.predictor != "none"

    @cached_property
    def responses(self) -> npt.NDArray[np.float64]:
        """Representative response lengths of each group, [groups, num_generations] tokens."""
        return response_lengths(self.lengths, self.num_generations, self.length_max)

    @property
    def publish_s(self) -> float:
        """Seconds of training from the optimizer step, after every group, to the published weights; 0: unknown."""
        return 0.0 if self.waits is None else min(self.waits.publish_s, self.training_s or 0.0)

    @property
    def trainer_busy_s(self) -> float:
        """Seconds after the plan until the trainer's machines may generate.

        If iterations overlap, the trainer first ends and concludes the previous iteration while the crew generates. The
        remaining training time is taken from the last iteration (StepWaits.behind_s). A standing crew begins the
        iteration as late as the trainer, so the result is 0.
        """
        if not self.overlaps or self.crew == "standing":
            return 0.0
        behind_s = math.inf if self.waits is None else self.waits.behind_s
        return min(self.training_s or 0.0, behind_s) + self.control_s

    @property
    def training_s(self) -> float | None:
        """Seconds of training: the given train_s, or else the measured time of the last iteration; None: unknown."""
        return self.train_s if self.train_s is not None or self.waits is None else self.waits.train_s


class BudgetExceeded(WrongInputError):  # noqa: N818 - reads as what happened
    """No plan fits the budget; the message names the field, the least that is needed, and what is allowed."""
