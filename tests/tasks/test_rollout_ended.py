"""The task behind a rollout map, as Flyte calls it."""

import functools

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from storage.records import layout
from storage.records.crew_records import ended_slots
from storage.records.failures import slot_failures
from tasks.configuration.references import PlanReference
from tasks.local_map import crew_map
from tasks.rollout_ended import rollout_ended
from tests.kept_failures import keep_slot
from tests.map_tasks import refused
from tests.small_run import Unreachable, everything, memory_store

URL = "memory://rollout-ended"
REFERENCE = PlanReference(run_url=URL, iteration=4, weight_version=4, execution="here:host:12")


def test_it_notes_for_its_execution_that_slots_start_no_more():
    store = memory_store("rollout-ended")
    assert rollout_ended(plan=REFERENCE, pool="rollout", slots=[0, 1])
    assert rollout_ended(plan=REFERENCE, pool="far", slots=[2])
    assert ended_slots(store, 4, REFERENCE.execution) == {0, 1, 2}
    assert ended_slots(store, 4, "another") == ended_slots(store, 3, REFERENCE.execution) == set()


@pytest.mark.slow
def test_what_the_store_refused_a_member_to_say_is_kept_when_its_map_has_ended(caplog):
    store = memory_store("rollout-ended")
    store.put(layout.RUN, b"a run")
    keep_slot(store, 4, REFERENCE.execution, 2, "ValueError: its own words")
    assert crew_map(functools.partial(refused, plan=REFERENCE))(slot=[7, 1, 2]) == [7, None, None]
    assert "failed: StoreDenied: cannot put 'x': the token of slot 1 has expired" in caplog.text
    rollout_ended(plan=REFERENCE, pool="rollout", slots=[7, 1, 2])
    errors = {slot: each.error for slot, each in slot_failures(store, 4, REFERENCE.execution).items()}
    assert errors == {
        1: "StoreDenied: cannot put 'x': the token of slot 1 has expired",
        2: "ValueError: its own words",
    }


def test_for_a_standing_crew_it_notes_so_in_every_iteration_that_is_not_concluded():
    store = memory_store("rollout-ended")
    for iteration in range(6):
        store.put(layout.report(iteration), b"committed")
    assert rollout_ended(plan=REFERENCE, pool="rollout", slots=[0, 1], iterations=4)
    noted = [iteration for iteration in range(12) if ended_slots(store, iteration, REFERENCE.execution)]
    assert noted == [6, 7]


def test_a_second_attempt_says_the_same_and_a_pool_without_slots_says_nothing():
    store = memory_store("rollout-ended")
    rollout_ended(plan=REFERENCE, pool="rollout", slots=[0, 1])
    before = everything(store)
    rollout_ended(plan=REFERENCE, pool="rollout", slots=[0, 1])
    assert not rollout_ended(plan=REFERENCE, pool="far", slots=[])
    assert everything(store) == before


def test_a_store_that_does_not_answer_is_worth_another_attempt():
    class Deaf(Unreachable):
        put = Unreachable.get

    memory_store("rollout-ended", Deaf())
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        rollout_ended(plan=REFERENCE, pool="rollout", slots=[0])
