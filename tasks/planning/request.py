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
    """All that a plan is made from.

    keep_order: a member must begin its groups in the order of their numbers, as dynamic sampling takes them. reserved:
    the trainer's machines, which generate if settings.seeding says so; None: nothing is known of them. waits, seeding,
    width: of the last concluded iteration; width is the number of members by pool. asked: the same number in the newest
    plan, whose iteration may still be under way; None: there is no plan yet. train_s: seconds of a training step
    without waiting; None: unknown. training: whether it takes groups as they end, in the order of their numbers, or all
    at the end. past: the lengths of the last iterations' responses, the newest first, in the shape
    [groups, num_generations] of the next one. rules: those of the run's members. control_s: seconds between published
    weights and the next plan. overlaps: whether the next iteration is generated while this one is trained.
    spent_usd: the run's cost so far. usd_no_machine: an iteration's costs beside its machines (requests, egress, the
    control plane), as in the last one. length_max: the limit of a response's length in tokens.
    tool_s_per_token: seconds for which responses wait for tools, per token that they decode. crew: the kind of crew
    that is configured (rollout.crew).
    """

    num_generations: int
    lengths: GroupLengths
    offers: tuple[PoolCapacity, ...]
    settings: PlanningConfig
    rules: CrewRules
    keep_order: bool = False
    reserved: TrainerCapacity | None = None
    waits: StepWaits | None = None
    seeding: SeedingRecord | None = None
    width: tuple[tuple[str, int], ...] = ()
    asked: tuple[tuple[str, int], ...] | None = None
    train_s: float | None = None
    training: Literal["as_ended", "in_order", "at_end"] = "as_ended"
    past: tuple[npt.NDArray[np.float64], ...] = ()
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
        offered = [offer for offer in self.offers if offer.count_max]
        if not offered and self.reserved is not None:
            return self.reserved.step_time is not NOMINAL
        return all(offer.measured for offer in offered)

    @property
    def knows_lengths(self) -> bool:
        """Whether anything tells the groups apart."""
        return self.lengths.predictor != "none"

    @cached_property
    def responses(self) -> npt.NDArray[np.float64]:
        """Lengths that stand for the groups' responses: [groups, num_generations]."""
        return response_lengths(self.lengths, self.num_generations, self.length_max)

    @property
    def publish_s(self) -> float:
        """The end of training, which waits for every group."""
        return 0.0 if self.waits is None else min(self.waits.publish_s, self.training_s or 0.0)

    @property
    def trainer_busy_s(self) -> float:
        """Seconds after the plan until the trainer's machines may generate.

        If iterations overlap, the one before is trained to its end and concluded first; the crew generates meanwhile.
        What is left of its training is what was left in the last iteration. Not so if the crew stands: then it comes as
        late to this iteration as the trainer.
        """
        if not self.overlaps or self.crew == "standing":
            return 0.0
        behind_s = math.inf if self.waits is None else self.waits.behind_s
        return min(self.training_s or 0.0, behind_s) + self.control_s

    @property
    def training_s(self) -> float | None:
        """How long training takes: as given, or else as measured."""
        return self.train_s if self.train_s is not None or self.waits is None else self.waits.train_s


class BudgetExceeded(WrongInputError):  # noqa: N818 - reads as what happened
    """No plan fits the budget; the message names the field, the least that is needed, and what is allowed."""
