"""Joins the decisions of an iteration into one pure function: width, seeding and dispatch, with the reason of each.

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
    """The slots of an iteration with their groups.

    Attributes:
        slots: slots of the crew, pool by pool in the request's order, then slots on the trainer's machines. With fewer
            groups than members, some slots have no groups.
        seeding: how long the trainer's machines generate; None if the trainer's machines never generate.
        decisions: the plan's decisions, each with inputs, alternatives and a reason.
    """

    slots: tuple[SlotPlan, ...]
    seeding: SeedingRecord | None
    decisions: tuple[DecisionRecord, ...]


def plan_iteration(request: PlanningRequest) -> IterationPlan:
    """Choose the crew and assign the groups to members.

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
    for pool in request.pools:
        if min(pool.count_min, pool.count_max) < 0:
            raise ValueError(f"{pool.name}: {pool.count_min} to {pool.count_max} members; allowed: from 0 on")
    if request.reserved is None and not any(pool.count_max for pool in request.pools):
        raise ValueError(f"pools: no member in {len(request.pools)} pools; allowed: one, or engines of the trainer")
