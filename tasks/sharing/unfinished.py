"""How many tokens of a run's iteration are still to be generated: a guess, to choose which run a host helps."""

from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import PlanRecord
from storage.records.run import exists, read_plan, read_report
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore


def unfinished_tokens(store: ObjectStore, iteration: int) -> float:
    """The responses that its members say they have not finished, times the mean length of the iteration before.

    Without members, all responses of the plan; without an iteration before, the longest length that is allowed. 0 if
    the iteration is not planned or is closed, and in a run with turns, because a host runs none of its functions. It
    costs a LIST and one GET for each member. Raises as the store does.
    """
    if exists(store, layout.closed(iteration)):
        return 0.0
    try:
        plan = read_plan(store, iteration)
    except ObjectMissing:
        return 0.0
    return 0.0 if plan.config.get("turns") else _responses(store, plan) * _mean_length(store, plan)


def _responses(store: ObjectStore, plan: PlanRecord) -> int:
    members = []
    for key in store.list(layout.alive_all(plan.iteration)):
        try:
            members.append(records.read(store, HeartbeatRecord, key))
        except (ObjectMissing, CorruptObject):
            continue
    return sum(each.unfinished for each in members) if members else plan.num_responses


def _mean_length(store: ObjectStore, plan: PlanRecord) -> float:
    if plan.iteration:
        try:
            return read_report(store, plan.iteration - 1).metrics["completions/mean_length"]
        except (ObjectMissing, KeyError):
            pass
    return float(plan.sampling.max_completion_length)
