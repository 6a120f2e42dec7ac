"""The index of an iteration while it is under way, closed, and compacted."""

import pytest

from storage.journal.compaction import compact
from storage.records import layout, records
from storage.records.records import BatchRecord, ClosedRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from tasks.viewing.response_index import read_index
from tests.committed_runs import begin, committed_iteration, grade, plan_iteration, roll_out
from tests.watched_run import Counted


@pytest.fixture
def begun():
    """(store, plan) of an iteration in which responses 2 and 3 are recorded, 1 has ended, and 0 runs."""
    store = Counted()
    begin(store)
    plan = plan_iteration(store, 0)
    roll_out(store, plan, responses=(1, 2, 3))
    grade(store, plan, 0, (2, 3))
    return store, plan


@pytest.mark.parametrize("part_tokens", [1, 1000])
def test_every_response_of_an_open_iteration_has_its_state(begun, part_tokens):
    index = read_index(*begun, part_tokens)
    assert index.states == ["running", "ended", "trained", "trained"]
    assert index.lengths == [3, 3, 4, 1]
    assert index.truncated == [False, False, False, True]
    assert index.rewards == [None, None, 0.5, 0.75]
    assert index.rewards_by_name == {"exact": [None, None, 0.5, 0.75], "style": [None, None, 0.5, 0.5]}
    assert index.slots == [0, 0, 1, 1]
    assert index.stretches == [1, 1, 1, 1]
    assert index.batches == [None, None, 0, 0]


def test_what_was_not_begun_is_there_too():
    store = MemoryStore()
    begin(store)
    index = read_index(store, plan_iteration(store, 0))
    assert index.states == ["not begun"] * 4
    assert index.slots == [None] * 4


def test_what_a_closed_iteration_does_not_record_is_unused(begun):
    store, plan = begun
    records.put(store, layout.closed(0), ClosedRecord(iteration=0, reason="enough"))
    assert read_index(store, plan).states == ["unused", "unused", "trained", "trained"]


def test_no_token_of_a_committed_iteration_is_read():
    store = Counted()
    plan = committed_iteration(store, 0)
    journalled = read_index(store, plan)
    compact(store, 0)
    for prefix in (layout.journal(0), layout.claims(0)):
        for key in store.list(prefix):
            store.delete(key)
    store.asked.clear()
    assert read_index(store, plan) == journalled
    assert journalled.stretches == [2, 1, 1, 1]
    assert not [key for key in store.asked if key.endswith(".arrow")]


def test_an_iteration_that_is_closed_and_deleted_meanwhile_is_read_again(begun):
    store, plan = begun
    get = store.get

    class Overtaken(MemoryStore):
        overtake = True

        def get(self, key, start=0, end=None):
            if "/journal/" in key and self.overtake:
                self.overtake = False
                records.put(self, layout.closed(0), ClosedRecord(iteration=0, reason="enough"))
                for name in [*self.list(layout.journal(0)), *self.list(layout.claims(0))]:
                    self.delete(name)
            return super().get(key, start, end)

    copy = Overtaken()
    for key in store.list(""):
        copy.put(key, get(key))
    assert read_index(copy, plan).states == ["unused", "unused", "trained", "trained"]


def test_a_batch_of_another_plan_is_refused(begun):
    store, plan = begun
    batch = records.read(store, BatchRecord, layout.batch(0, 0))
    wrong = batch.responses[0].__class__(**{**vars(batch.responses[0]), "response": 4})
    records.put(store, layout.batch(0, 0), BatchRecord(iteration=0, number=0, responses=(wrong,)))
    with pytest.raises(CorruptObject, match="it names response 4; the plan has 4"):
        read_index(store, plan)
