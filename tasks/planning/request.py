"""All that a plan is made from, and what is said when none is affordable."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from storage.planning_records import SeedingRecord
from tasks.planning.config import PlanningConfig
from tasks.planning.makespan import response_lengths
from tasks.planning.offer import CrewOffer, GroupLengths, ReservedOffer, StepWaits
from tasks.planning.step_time import NOMINAL


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """All that a plan is made from.

    keep_order: a member must begin its groups in the order of their numbers (dynamic sampling takes them so).
    reserved: the trainer's machines, which generate where settings.seeding says so; None: nothing is known of them.
    waits, seeding, width: of the last concluded iteration; width is the number of members by pool. train_s: a training
    step takes so long without waiting; None: not known. training: whether it takes groups as they end, in the order of
    their numbers, or all at the end. spent_usd: of the run so far. usd_no_machine: what an iteration
    costs beside its machines (requests, egress, the control plane), as the last one did. length_max: no response gets
    longer (tokens).
    """

    num_generations: int
    lengths: GroupLengths
    offers: tuple[CrewOffer, ...]
    settings: PlanningConfig
    keep_order: bool = False
    reserved: ReservedOffer | None = None
    waits: StepWaits | None = None
    seeding: SeedingRecord | None = None
    width: tuple[tuple[str, int], ...] = ()
    train_s: float | None = None
    training: Literal["as_ended", "in_order", "at_end"] = "as_ended"
    spent_usd: float = 0.0
    usd_no_machine: float = 0.0
    length_max: float = math.inf

    @property
    def measured(self) -> bool:
        """Whether seconds and dollars can be foretold: every pool that may be used has a measured step time."""
        offered = [offer for offer in self.offers if offer.count_max]
        if not offered and self.reserved is not None:
            return self.reserved.step_time is not NOMINAL
        return all(offer.measured for offer in offered)

    @cached_property
    def responses(self) -> npt.NDArray[np.float64]:
        """Lengths that stand for the groups' responses: [groups, num_generations]."""
        return response_lengths(self.lengths, self.num_generations, self.length_max)

    @property
    def training_s(self) -> float | None:
        """How long training takes: what is said of it, else what it took."""
        return self.train_s if self.train_s is not None or self.waits is None else self.waits.train_s


class BudgetExceeded(ValueError):  # noqa: N818 - reads as what happened
    """No plan within the budget; names the field, the least that is needed, and what is allowed."""
