"""Joins all decisions of an iteration into one pure function: width, seeding and dispatch, with their reasons.

The plan task calls it in every iteration, and the forecast's simulator calls the same function. No IO, no clock.
"""

from dataclasses import dataclass

from storage.records.planning_records import DecisionRecord, SeedingRecord
from storage.records.records import SlotPlan
from tasks.planning.explain import explain
from tasks.planning.request import BudgetExceeded, PlanningRequest
from tasks.planning.width import choose_width

__all__ = ["BudgetExceeded", "IterationPlan", "PlanningRequest", "plan_iteration"]


@dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """The slots with their groups; the reasons are in `decisions`.

    slots: the crew's, pool by pool in the order of the offers, then those on the trainer's machines. If there are fewer
    groups than members, some slots have no groups.
    """

    slots: tuple[SlotPlan, ...]
    seeding: SeedingRecord | None
    decisions: tuple[DecisionRecord, ...]


def plan_iteration(request: PlanningRequest) -> IterationPlan:
    """Choose the crew and deal the groups to it.

    Raises BudgetExceeded if no allowed plan is affordable, and ValueError if there is no member to generate.
    """
    _check(request)
    choice = choose_width(request)
    crew = choice.crew
    slots = tuple(
        SlotPlan(slot=slot, pool=member.pool, groups=assignment.groups, batch_max=assignment.batch_max)
        for slot, (member, assignment) in enumerate(zip(crew.members, crew.assignments, strict=True))
    )
    return IterationPlan(slots=slots, seeding=crew.seeding, decisions=explain(request, choice))


def _check(request: PlanningRequest) -> None:
    if not len(request.lengths) or request.num_generations < 1:
        raise ValueError(f"{len(request.lengths)} groups of {request.num_generations}; allowed: at least one of each")
    if request.reserved is not None and request.reserved.engines < 1:
        raise ValueError(f"reserved: {request.reserved.engines} engines; allowed: at least one, or None")
    for offer in request.offers:
        if min(offer.count_min, offer.count_max) < 0:
            raise ValueError(f"{offer.pool}: {offer.count_min} to {offer.count_max} members; allowed: from 0 on")
    if request.reserved is None and not any(offer.count_max for offer in request.offers):
        raise ValueError(f"offers: no member in {len(request.offers)} pools; allowed: one, or engines of the trainer")
