"""The parts of a compacted iteration: how they are divided, killed compactions, two at once, and damage."""

from dataclasses import replace

import pytest

from storage.journal.compaction import compact, read_responses, unnamed_parts
from storage.journal.response_parts import ResponsesRecord
from storage.records import layout, records
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject, ObjectMissing
from tests.committed_runs import TOKENS, committed_iteration
from tests.storage.journal.test_compaction import KEY, SMALL, delete, part_keys, stored

# With SMALL tokens to a part: the responses have 5, 3, 4 and 1.
SMALL_PARTS = [(0, 0), (1, 1), (2, 3)]


@pytest.fixture
def store():
    found = MemoryStore()
    committed_iteration(found, 0)
    return found


def test_a_part_holds_as_many_tokens_as_are_allowed_or_a_single_longer_response(store):
    for part_tokens, bounds in ((1, [(r, r) for r in range(4)]), (SMALL, SMALL_PARTS), (8, [(0, 1), (2, 3)])):
        compacted = copy_of(store)
        compact(compacted, 0, part_tokens)
        assert [(part.first, part.last) for part in records.read(compacted, ResponsesRecord, KEY).parts] == bounds
    with pytest.raises(ValueError, match="part_tokens: value 0; allowed: 1 or more"):
        compact(store, 0, 0)


class CountsParts(MemoryStore):
    """Notes the parts that are created."""

    def __init__(self, objects):
        super().__init__()
        self._objects.update(objects)
        self.created = []

    def create(self, key, body):
        is_ours = super().create(key, body)
        if is_ours and key.startswith(layout.responses_parts(0)):
            self.created.append(key)
        return is_ours


def copy_of(store):
    return CountsParts({key: store.get(key) for key in store.list("")})


@pytest.mark.parametrize("done", range(4))
def test_a_killed_compaction_goes_on_with_the_first_part_that_is_missing(store, done):
    whole = copy_of(store)
    compact(whole, 0, SMALL)
    keys = part_keys(whole)
    for key in keys[:done]:
        store.put(key, whole.get(key))
    again = copy_of(store)
    compact(again, 0, SMALL)
    assert again.created == keys[done:]
    assert [row.token_ids.tolist() for row in stored(again)] == [TOKENS[response] for response in range(4)]


def test_a_part_that_a_killed_compaction_left_is_compared_like_any_other(store):
    whole = copy_of(store)
    compact(whole, 0, SMALL)
    first, second, _ = part_keys(whole)
    store.put(first, whole.get(second))
    with pytest.raises(CorruptObject, match=f"'{first}'.* its 1 responses are not the 1 that the batches name"):
        compact(store, 0, SMALL)
    assert KEY not in store.list("")


def test_two_compactions_that_divide_otherwise_end_with_the_parts_of_one(store):
    class Overtaken(CountsParts):
        """Another process, with larger parts, is done before the n-th part is created, and maybe sweeps."""

        def __init__(self, objects, at, *, sweeps):
            super().__init__(objects)
            self.at, self.sweeps = at, sweeps

        def create(self, key, body):
            is_due = key == KEY if self.at == 3 else len(self.created) == self.at
            if is_due and self.at is not None:
                self.at = None
                compact(self, 0, 8)
                if self.sweeps:
                    for left in unnamed_parts(self, 0, self.list("")):
                        self.delete(left)
                    delete(self, layout.journal(0))
            return super().create(key, body)

    objects = {key: store.get(key) for key in store.list("")}
    for at in range(4):
        for sweeps in (False, True):
            shared = Overtaken(objects, at, sweeps=sweeps)
            compact(shared, 0, SMALL)
            assert shared.at is None
            record = records.read(shared, ResponsesRecord, KEY)
            assert [(part.first, part.last) for part in record.parts] == [(0, 1), (2, 3)]
            for key in unnamed_parts(shared, 0, shared.list("")):
                shared.delete(key)
            assert [row.token_ids.tolist() for row in stored(shared)] == [TOKENS[r] for r in range(4)]


def test_without_a_record_no_part_is_left_over(store):
    compact(store, 0, SMALL)
    keys = store.list("")
    assert unnamed_parts(store, 0, keys) == []
    store.delete(KEY)
    with pytest.raises(ObjectMissing):
        unnamed_parts(store, 0, keys)


@pytest.mark.parametrize("kept", [[0, 2], [1, 2], [0, 1], []], ids=str)
def test_a_record_that_does_not_name_every_response_is_noticed(store, kept):
    compact(store, 0, SMALL)
    record = records.read(store, ResponsesRecord, KEY)
    records.put(store, KEY, replace(record, parts=tuple(record.parts[index] for index in kept)))
    left = sum(last - first + 1 for first, last in (SMALL_PARTS[index] for index in kept))
    with pytest.raises(CorruptObject, match=f"'{KEY}'.*its parts have {left} of the 4 responses that the batches name"):
        compact(store, 0, SMALL)


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 0, 1, 2]], ids=str)
def test_a_record_whose_parts_do_not_ascend_is_refused(store, order):
    compact(store, 0, SMALL)
    parts = records.read(store, ResponsesRecord, KEY).parts
    with pytest.raises(ValueError, match=r"parts: responses .*; allowed: first to last of each, in ascending order"):
        ResponsesRecord(iteration=0, parts=tuple(parts[index] for index in order))


@pytest.mark.parametrize("which", range(3))
def test_a_part_that_is_gone_or_another_is_noticed_by_compaction_and_by_readers(store, which):
    compact(store, 0, SMALL)
    key = part_keys(store)[which]
    swapped, lost = copy_of(store), copy_of(store)
    swapped.put(key, store.get(part_keys(store)[which - 1]))
    lost.delete(key)
    for damaged, problem in ((swapped, "it is not the part that"), (lost, "it is gone, although")):
        with pytest.raises(CorruptObject, match=f"'{key}'.*{problem} '{KEY}' names"):
            compact(damaged, 0, SMALL)
        with pytest.raises(CorruptObject, match=f"'{key}'.*{problem} '{KEY}' names"):
            list(read_responses(damaged, 0))
