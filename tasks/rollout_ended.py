"""The task behind a rollout map: a note of the map's end, after which the trainer does not wait for the map's slots."""

from contextlib import nullcontext

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.granted import is_in_a_pod
from resources.pools import ControlPoolConfig, task_settings
from storage.records.crew_records import note_rollout_ended
from storage.records.failures import slot_failures
from storage.records.run import next_iteration
from storage.stores.connect import connect
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import PlanReference
from tasks.local_map import after_standing_map, failed_slots
from tasks.reporting.last_failures import TaskSubject, keep
from tasks.task_log import logged_task, place_of

DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL))
def rollout_ended(plan: PlanReference, pool: str, slots: list[int], iterations: int = 1) -> bool:
    """Write that none of `slots`, the plan's on `pool`, will be started again; returns whether there were any.

    iterations: for how many the map was, from the plan's on; those that are concluded need no note.
    """

    def note() -> None:
        store = connect(plan.run_url)
        first = plan.iteration if iterations == 1 else max(plan.iteration, next_iteration(store))
        for number in range(first, plan.iteration + iterations):
            note_rollout_ended(store, number, plan.execution, pool, slots)
        known = slot_failures(store, first, plan.execution)
        for slot, cause in failed_slots(plan).items():
            if slot not in known:
                work = TaskSubject(
                    task="rollout", run_url=plan.run_url, execution=plan.execution, iteration=first, slot=slot
                )
                keep(work, RuntimeError(cause), cause)

    # On one machine it is no phase of its own.
    with (
        logged_task(place_of(plan), None, f"end of the slots of pool {pool}", code=plan.code)
        if is_in_a_pod()
        else nullcontext()
    ):
        try:
            if slots:
                after_standing_map(note)
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
    return bool(slots)
