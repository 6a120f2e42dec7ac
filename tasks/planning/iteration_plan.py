"""The plan of an iteration as one pure function of what is known: width, seeding, dispatch, and why.

The plan task calls it in every iteration, and the forecast's simulator calls the same. No IO, no clock.
"""

from dataclasses import dataclass

from storage.planning_records import DecisionRecord, SeedingRecord
from storage.records import SlotPlan
from tasks.planning.explain import explain
from tasks.planning.request import BudgetExceeded, PlanningRequest
from tasks.planning.width import choose_width

__all__ = ["BudgetExceeded", "IterationPlan", "PlanningRequest", "plan_iteration"]


@dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """Who generates what; why, is in `decisions`.

    slots: the crew's, pool by pool in the order of the offers, then those on the trainer's machines. A slot may have no
    groups, where there are fewer groups than members.
    """

    slots: tuple[SlotPlan, ...]
    seeding: SeedingRecord | None
    decisions: tuple[DecisionRecord, ...]


def plan_iteration(request: PlanningRequest) -> IterationPlan:
    """Choose the crew and deal the groups to it.

    Raises BudgetExceeded when nothing that is allowed is affordable, and ValueError when there is nobody to generate.
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
