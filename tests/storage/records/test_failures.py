"""The last failure of each task: kept until the task succeeds, and a hint, whatever lies in its place."""

import pytest

from storage.records import layout, records
from storage.records.crew_records import execution_digest
from storage.records.failures import (
    READ_MAX,
    FailureRecord,
    forget_failure,
    forget_slots,
    keep_failure,
    last_failures,
    slot_failures,
)
from storage.stores.memory import MemoryStore
from tests.kept_failures import keep_slot


def keep(store, task, iteration=3, at_s=1.0, error="ValueError: bad"):
    failure = FailureRecord(task=task, iteration=iteration, execution="e", host="m", error=error, at_s=at_s)
    keep_failure(store, failure)
    return failure


def test_of_each_task_the_last_failure_is_kept_newest_first():
    store = MemoryStore()
    keep(store, "train", at_s=1.0)
    last = [keep(store, "train", at_s=5.0), keep(store, "plan", at_s=4.0), keep(store, "evaluation", at_s=3.0)]
    keep_slot(store, 3, "e", 7, "EngineError: no", at_s=2.0)
    assert last_failures(store, 3)[:3] == last
    assert last_failures(store, 3)[3].slot == 7
    assert len(store.list(layout.FAILURES)) == 4


def test_a_success_takes_back_the_failure_of_its_task_alone():
    store = MemoryStore()
    keep(store, "train")
    kept = keep(store, "plan")
    forget_failure(store, "train")
    forget_failure(store, "train")
    assert last_failures(store, 0) == [kept]


def test_what_failed_on_a_committed_iteration_has_succeeded_since_but_for_an_evaluation():
    store = MemoryStore()
    for task in ("plan", "collect", "train", "conclude"):
        keep(store, task, iteration=3)
    keep_slot(store, 3, "e", 0, "x")
    kept = keep(store, "evaluation", iteration=3)
    assert len(last_failures(store, 3)) == 6
    assert last_failures(store, 4) == [kept]


def test_slots_of_other_executions_are_forgotten_with_an_iteration():
    store = MemoryStore()
    keep_slot(store, 3, "e", 0, "of a standing member")
    keep_slot(store, 3, "earlier", 0, "old")
    store.put(layout.slot_failures(execution_digest("earlier"), 3) + "stray", b"x")
    forget_slots(store, "e")
    assert slot_failures(store, 3, "earlier") == {}
    assert slot_failures(store, 3, "e")[0].error == "of a standing member"
    assert len(store.list("failures/rollout/")) == 2


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff", b"null", b"[" * 5000])
def test_one_that_is_damaged_is_passed_over(body):
    store = MemoryStore()
    kept = keep(store, "plan")
    store.put(layout.failure("train"), body)
    store.put(layout.slot_failure(execution_digest("e"), 3, 1), body)
    assert last_failures(store, 0) == [kept]
    assert slot_failures(store, 3, "e") == {}


@pytest.mark.parametrize("name", ["train", "trainer.json", "a/b/c.json", "rollout/x/000003/00001.json", "train.json/x"])
def test_a_stray_key_says_nothing(name):
    store = MemoryStore()
    key = f"{layout.FAILURES}{name}"
    stray = FailureRecord(task="train", iteration=3, execution="e", host="m", error="x", at_s=1.0)
    store.put(key, records.encode(key, stray))
    assert last_failures(store, 0) == []


def test_a_record_below_the_key_of_another_task_says_nothing():
    store = MemoryStore()
    key = layout.failure("plan")
    records.put(store, key, FailureRecord(task="train", iteration=3, execution="e", host="m", error="x", at_s=1.0))
    assert last_failures(store, 0) == []


def test_of_a_large_crew_that_fails_a_bounded_number_is_read_and_no_task_is_crowded_out():
    store = MemoryStore()
    for slot in range(READ_MAX + 20):
        keep_slot(store, 3, "e", slot, "x", at_s=9.0)
    kept = keep(store, "train", at_s=1.0)
    found = last_failures(store, 0)
    assert (len(found), found[-1]) == (READ_MAX, kept)


@pytest.mark.parametrize("at_s", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_time_outside_of_calendars_is_refused(at_s):
    store = MemoryStore()
    keep(store, "train", at_s=at_s)
    assert last_failures(store, 0) == []
