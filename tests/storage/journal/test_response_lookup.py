"""Single responses, from the journal and from parts, recorded, running and unused."""

from collections import Counter

import pytest

from storage.journal.compaction import compact, each_batch, read_responses
from storage.journal.response_lookup import ResponseLookup
from storage.journal.shard import Finish
from storage.records import layout
from storage.records.prompt_table import read_prompts
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from tests.committed_runs import TOKENS, begin, committed_iteration, grade, plan_iteration, roll_out
from tests.watched_run import Counted


def lookup(store, plan):
    return ResponseLookup(store, plan, [prompt.prompt_id for prompt in read_prompts(store, plan)])


def batches(store):
    return {graded.response: batch.number for batch in each_batch(store, 0) for graded in batch.graded}


def delete(store, prefix):
    for key in store.list(prefix):
        store.delete(key)


@pytest.mark.parametrize("part_tokens", [1, 5, 1000])
def test_a_recorded_response_is_the_same_from_the_journal_and_from_its_part(part_tokens):
    store = MemoryStore()
    plan = committed_iteration(store, 0)
    recorded = batches(store)
    journalled = [lookup(store, plan).find(number, recorded[number]) for number in range(4)]
    compact(store, 0, part_tokens)
    delete(store, layout.journal(0))
    delete(store, layout.claims(0))
    reader = lookup(store, plan)
    stored = [reader.find(number, recorded[number]) for number in (3, 0, 2, 1)]
    every = list(read_responses(store, 0))
    for number, found in zip((3, 0, 2, 1), stored, strict=True):
        assert found.response.equals(every[number])
        assert found.response.equals(journalled[number].response)
        assert found.lineage == journalled[number].lineage
    assert [span.incarnation[:7] for span in journalled[0].lineage] == ["00000-a", "00000-b"]
    assert journalled[0].response.spans == (3, 2)


def test_a_response_is_found_while_it_goes_on():
    store = MemoryStore()
    begin(store)
    plan = plan_iteration(store, 0)
    assert lookup(store, plan).find(1, None).response.token_ids.tolist() == []
    roll_out(store, plan, responses=(2,))
    running, ended = (lookup(store, plan).find(number, None) for number in (0, 2))
    assert (running.response.finish, running.response.token_ids.tolist()) == (Finish.RUNNING, TOKENS[0][:3])
    assert (ended.response.finish, ended.response.reward, ended.response.prompt_id) == (Finish.STOP, None, "p1")


def test_only_the_shards_of_those_that_wrote_it_are_read():
    store = Counted()
    plan = committed_iteration(store, 0)
    recorded, reader = batches(store), lookup(store, plan)
    store.asked.clear()
    reader.find(2, recorded[2])
    journals = {key.split("/")[3] for key in store.asked if "/journal/" in key}
    assert journals == {f"00001-{'c' * 16}"}


def test_what_is_not_there_is_said():
    store = MemoryStore()
    plan = committed_iteration(store, 0)
    recorded = batches(store)
    with pytest.raises(LookupError, match="response: value 4; allowed: 0 to 3"):
        lookup(store, plan).find(4, None)
    with pytest.raises(LookupError, match="response: value 0; allowed: one that 'iterations/000000/batches/000000"):
        lookup(store, plan).find(0, recorded[2])
    compact(store, 0)
    delete(store, layout.journal(0))
    assert lookup(store, plan).find(0, None) is None
    [part] = store.list(layout.responses_parts(0))
    store.put(part, store.get(part)[:-1])
    with pytest.raises(CorruptObject):
        lookup(store, plan).find(0, recorded[0])


def test_a_response_that_is_compacted_and_deleted_meanwhile_is_read_from_its_part():
    class Overtaken(MemoryStore):
        overtake = False

        def get(self, key, start=0, end=None):
            if self.overtake and "/journal/" in key:
                self.overtake = False
                compact(self, 0)
                delete(self, layout.journal(0))
            return super().get(key, start, end)

    store = Overtaken()
    plan = committed_iteration(store, 0)
    recorded, reader = batches(store), lookup(store, plan)
    store.overtake = True
    assert reader.find(0, recorded[0]).response.token_ids.tolist() == TOKENS[0]
    assert not store.overtake


def same(one, other):
    return one.response.equals(other.response) and one.lineage == other.lineage


@pytest.mark.parametrize("part_tokens", [1, 5, 1000])
@pytest.mark.parametrize("compacted", [False, True])
def test_several_at_once_are_what_each_is_alone(part_tokens, compacted):
    store = Counted()
    plan = committed_iteration(store, 0)
    recorded = batches(store)
    if compacted:
        compact(store, 0, part_tokens)
        delete(store, layout.journal(0))
    alone = {number: lookup(store, plan).find(number, recorded[number]) for number in (0, 1, 3)}
    at_once = lookup(store, plan)
    store.asked.clear()
    found = at_once.find_all([3, 0, 1], part_tokens)
    assert list(found) == [0, 1, 3]
    assert all(same(found[number], alone[number]) for number in alone)
    asked = Counter(store.asked)
    assert asked[layout.batch(0, 0)] == 1
    assert asked[layout.responses(0)] <= 2  # whether it is there, and what it says
    assert all(asked[key] <= 1 for key in store.list(layout.responses_parts(0)))
    if not compacted and part_tokens == 1000:
        assert all(asked[key] == 1 for key in store.list(layout.journal(0)) if key.endswith(".arrow"))


def test_several_at_once_are_there_while_they_go_on():
    store = MemoryStore()
    begin(store)
    plan = plan_iteration(store, 0)
    roll_out(store, plan, responses=(1, 2, 3))
    grade(store, plan, 0, (2, 3))
    for part_tokens in (1, 1000):
        found = lookup(store, plan).find_all(range(4), part_tokens)
        assert [each.response.finish for each in found.values()] == [
            Finish.RUNNING,
            Finish.STOP,
            Finish.STOP,
            Finish.LENGTH,
        ]
        assert [each.response.reward for each in found.values()] == [None, None, 0.5, 0.75]
        assert all(same(found[number], lookup(store, plan).find(number, None)) for number in (0, 1))
    assert lookup(store, plan).find_all([]) == {}


def test_several_that_are_compacted_and_deleted_meanwhile_are_read_from_their_parts():
    class Overtaken(MemoryStore):
        overtake = True

        def get(self, key, start=0, end=None):
            if "/journal/" in key and self.overtake:
                self.overtake = False
                compact(self, 0)
                delete(self, layout.journal(0))
                delete(self, layout.claims(0))
            return super().get(key, start, end)

    store = Overtaken()
    store.overtake = False
    plan = committed_iteration(store, 0)
    store.overtake = True
    found = lookup(store, plan).find_all(range(4))
    assert [each.response.token_ids.tolist() for each in found.values()] == [TOKENS[number] for number in range(4)]
    assert not store.overtake
