"""Which slots of a plan an execution starts: those with work on its pools, as long as there is work for them.

A plan is written once, but executions are interrupted: what an earlier one generated needs no machine again.
"""

import logging
from collections.abc import Iterable, Sequence

from storage.journal.assembly import unended_responses
from storage.records import layout
from storage.records.crew_records import note_rollout_ended
from storage.records.records import PlanRecord
from storage.records.run import exists
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)
# No pool's name has it, so the note beside that of the pool's map, which has ended, does not replace that.
SPARED = ".spared"


def crew_slots(plan: PlanRecord, pools: Iterable[str]) -> list[list[int]]:
    """The slots with work on each of these pools, in their order, without the trainer's.

    Slots of a pool that is not among them, for example because it was removed after the plan was written, go to the
    first.
    """
    slots: dict[str, list[int]] = {pool: [] for pool in pools}
    first = next(iter(slots.values()))
    for place in plan.crew_slots:
        slots.get(place.pool, first).append(place.slot)
    return list(slots.values())


def needed_slots(store: ObjectStore, plan: PlanRecord) -> set[int]:
    """The slots for which something is left to generate: none in a closed iteration, else at most one per response.

    They are the slots whose own responses have not ended, and the first of the others, which take what these have not
    begun. While responses end, a later call returns a part of what an earlier one returned.
    """
    if exists(store, layout.closed(plan.iteration)):
        return set()
    left = set(unended_responses(store, plan))
    own = {place.slot for place in plan.slots if not left.isdisjoint(plan.responses_of(place.slot))}
    others = [place.slot for place in plan.slots if place.groups and place.slot not in own]
    return own.union(others[: max(0, len(left) - len(own))])


def started_slots(
    store: ObjectStore, plan: PlanRecord, pools: Sequence[str], execution: str, *, stands: bool
) -> list[list[int]]:
    """The needed ones of `crew_slots`; for the others the run gets the note that this execution does not start them.

    stands: the execution's crew stands, so no member is started for this plan alone.
    """
    slots = crew_slots(plan, pools)
    if stands:
        return slots
    try:
        needed = needed_slots(store, plan)
    except (CorruptObject, ObjectMissing) as error:
        # The trainer says what is wrong with the journal, if that matters to training.
        log.warning("iteration %d: all slots are started, because what is left is not known: %s", plan.iteration, error)
        return slots
    spared = {pool: [slot for slot in each if slot not in needed] for pool, each in zip(pools, slots, strict=True)}
    for pool, each in spared.items():
        if each:
            note_rollout_ended(store, plan.iteration, execution, f"{pool}{SPARED}", each)
            log.info("iteration %d: slots %s have nothing left to generate and are not started", plan.iteration, each)
    return [[slot for slot in each if slot in needed] for each in slots]
