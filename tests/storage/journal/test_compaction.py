"""From batches and journal to parts and back, on iterations written by hand."""

from dataclasses import replace

import numpy as np
import pytest

from storage.journal.compaction import compact, read_batches, read_parts, read_responses, unused_responses
from storage.journal.response_parts import PART_TOKENS, ResponsesRecord
from storage.journal.responses import Response, decode_responses, encode_responses
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.framing import trailer_digest
from storage.records.records import BatchRecord
from storage.records.run import read_plan
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject, ObjectMissing
from tests.committed_runs import TOKENS, committed_iteration, grade, plan_iteration, roll_out
from tests.journals import LOGPROB

KEY = layout.responses(0)
# The responses have 5, 3, 4 and 1 tokens: with 5 tokens to a part, the third and fourth make one.
SMALL = 5
PARTS = pytest.mark.parametrize("part_tokens", [SMALL, PART_TOKENS], ids=["three parts", "one part"])


def part_keys(store):
    return store.list(layout.responses_parts(0))


def stored(store):
    """The responses of all parts, as the record names them."""
    parts = records.read(store, ResponsesRecord, KEY).parts
    keys = [layout.responses_part(0, part.first, part.last) for part in parts]
    assert keys == part_keys(store)
    return [row for key in keys for row in decode_responses(key, store.get(key))]


@pytest.fixture
def store():
    found = MemoryStore()
    committed_iteration(found, 0)
    return found


def delete(store, prefix):
    for key in store.list(prefix):
        store.delete(key)


@PARTS
def test_the_parts_hold_what_the_batches_name(store, part_tokens):
    compact(store, 0, part_tokens)
    rows = stored(store)
    assert [row.token_ids.tolist() for row in rows] == [TOKENS[response] for response in range(4)]
    assert all((row.logprobs == np.float32(LOGPROB)).all() for row in rows)
    assert [(row.response, row.group, row.prompt_id, row.spans) for row in rows] == [
        (0, 0, "p0", (3, 2)),
        (1, 0, "p0", (3,)),
        (2, 1, "p1", (4,)),
        (3, 1, "p1", (1,)),
    ]
    assert [row.finish for row in rows] == [Finish.STOP] * 3 + [Finish.LENGTH]
    assert [row.reward for row in rows] == [0.0, 0.25, 0.5, 0.75]
    assert rows[0].rewards == {"exact": 0.0, "style": None}
    assert rows[3].rewards == {"exact": 0.75, "style": 0.5}


@PARTS
def test_it_reads_the_same_compacted_and_from_the_journal(store, part_tokens):
    live = [row for rows in read_parts(store, 0, part_tokens) for row in rows]
    compact(store, 0, part_tokens)
    delete(store, layout.journal(0))
    delete(store, layout.claims(0))
    compacted = list(read_responses(store, 0))
    assert len(live) == len(compacted) == 4
    assert all(a.equals(b) for a, b in zip(live, compacted, strict=True))


@PARTS
def test_compacting_again_changes_nothing_also_when_the_journal_is_going(store, part_tokens):
    compact(store, 0, part_tokens)
    before = {key: store.get(key) for key in (KEY, *part_keys(store))}
    for key in store.list(layout.journal(0)):
        store.delete(key)
        compact(store, 0)
    assert {key: store.get(key) for key in (KEY, *part_keys(store))} == before


def test_an_iteration_under_way_gives_what_is_finished():
    store = MemoryStore()
    plan = plan_iteration(store, 0)
    assert list(read_responses(store, 0)) == []
    roll_out(store, plan, responses=(1, 2, 3))  # response 0 has tokens and no end
    grade(store, plan, 0, (2, 3))
    rows = list(read_responses(store, 0))
    assert [(row.response, row.reward) for row in rows] == [(1, None), (2, 0.5), (3, 0.75)]
    assert rows[0].rewards == {}
    assert rows[0].token_ids.tolist() == TOKENS[1]


def test_what_the_trainer_recorded_counts_and_not_what_claims_say_later(store):
    # A claim that seals below what was consumed: from now on the claims alone give response 1 no token.
    reader_sees = [row.token_ids.tolist() for row in read_responses(store, 0)]
    delete(store, layout.claims(0))
    assert [row.token_ids.tolist() for row in read_responses(store, 0)] == reader_sees
    compact(store, 0)
    assert [row.token_ids.tolist() for row in read_responses(store, 0)] == reader_sees


def test_no_object_is_made_of_a_journal_with_a_hole(store):
    store.delete(layout.shard(0, f"00000-{'b' * 16}", 0))
    with pytest.raises(CorruptObject, match="it is gone"):
        compact(store, 0)
    assert KEY not in store.list("")


@pytest.mark.parametrize("lost", [(0, 1), (0,), (1,)], ids=["all", "the first", "the last"])
def test_a_journal_is_not_compacted_when_batches_are_lost(store, lost):
    for number in lost:
        store.delete(layout.batch(0, number))
    left = 2 if lost == (1,) else 0
    with pytest.raises(CorruptObject, match=f"{left} responses are recorded and 0 are unused; the plan has 4"):
        compact(store, 0)
    assert KEY not in store.list("")


def test_lost_batches_are_noticed_by_the_report_when_the_plan_wants_fewer_groups(store):
    wants(store, 1)
    store.delete(layout.batch(0, 0))
    batch = records.read(store, BatchRecord, layout.batch(0, 1))
    records.put(store, layout.batch(0, 0), replace(batch, number=0))
    store.delete(layout.batch(0, 1))
    with pytest.raises(CorruptObject, match="2 responses are graded; the report has 4"):
        compact(store, 0)


def test_a_response_recorded_twice_is_not_compacted(store):
    batch = records.read(store, BatchRecord, layout.batch(0, 1))
    records.put(store, layout.batch(0, 2), replace(batch, number=2))
    with pytest.raises(CorruptObject, match="6 responses are recorded and 0 are unused; the plan has 4, each of them"):
        compact(store, 0)


def test_batches_that_contradict_the_journal_are_not_compacted(store):
    key = layout.batch(0, 0)
    batch = records.read(store, BatchRecord, key)
    for lengths, said in (({"length": 5}, "5, 4 and stop"), ({"policy_length": 3}, "4, 3 and stop")):
        changed = (replace(batch.responses[0], **lengths), *batch.responses[1:])
        records.put(store, key, replace(batch, responses=changed))
        message = f"response 2 has 4 tokens, 4 of them sampled, and ends with stop; the batches say {said}"
        with pytest.raises(CorruptObject, match=message):
            compact(store, 0)
    assert KEY not in store.list("")


CHANGES = [
    {"token_ids": np.array([7, 7, 7, 7, 2], dtype=np.uint32)},
    {"logprobs": np.full(5, -1.0, dtype=np.float32)},
    {"reward": 1.0},
    {"rewards": {"exact": 0.0}},
    {"finish": Finish.LENGTH},
    {"prompt_id": "p1"},
    {"spans": (5,)},
    {"token_ids": np.zeros(1, np.uint32), "logprobs": np.zeros(1, np.float32), "origins": (1,), "spans": (1, 0)},
    {"logprobs": np.full(3, -0.5, dtype=np.float32), "origins": (2, 2, 1)},
    {"events": (b"{}",)},
]


def put_part(store, key, rows):
    """Put other rows into the part, and name it as it now is."""
    body = encode_responses(rows)
    record = records.read(store, ResponsesRecord, KEY)
    named = [layout.responses_part(0, part.first, part.last) for part in record.parts]
    parts = tuple(
        replace(part, digest=trailer_digest(body)) if name == key else part
        for name, part in zip(named, record.parts, strict=True)
    )
    store.put(key, body)
    records.put(store, KEY, replace(record, parts=parts))


def store_changed(store, change, part_tokens=PART_TOKENS):
    """Compact, and change the first response."""
    compact(store, 0, part_tokens)
    key = part_keys(store)[0]
    rows = decode_responses(key, store.get(key))
    first = {name: getattr(rows[0], name) for name in Response.__slots__}
    put_part(store, key, [Response(**(first | change)), *rows[1:]])


@PARTS
@pytest.mark.parametrize("change", CHANGES, ids="+".join)
def test_a_stored_part_that_is_not_the_journal_is_noticed(store, change, part_tokens):
    store_changed(store, change, part_tokens)
    with pytest.raises(CorruptObject, match="response 0 is not what the batches and the journal say"):
        compact(store, 0)


@pytest.mark.parametrize("change", CHANGES[2:-2], ids="+".join)
def test_without_the_journal_the_batches_still_tell(store, change):
    store_changed(store, change)
    delete(store, layout.journal(0))
    with pytest.raises(CorruptObject, match="response 0 is not what the batches and the journal say"):
        compact(store, 0)


def test_a_part_with_other_responses_is_noticed(store):
    compact(store, 0)
    [key] = part_keys(store)
    rows = decode_responses(key, store.get(key))
    put_part(store, key, rows[1:])
    with pytest.raises(CorruptObject, match="its 3 responses are not the 4 that the batches name"):
        compact(store, 0)
    with pytest.raises(CorruptObject, match=f"'{key}'.*its 3 responses are not 0 to 3, ascending"):
        list(read_responses(store, 0))


def test_a_reader_whose_journal_goes_meanwhile_takes_the_object(store):
    class Compacts(MemoryStore):
        """Another process compacts and deletes as soon as the reader has looked at the first shard."""

        going = True

        def get(self, key, start=0, end=None):
            body = store.get(key, start, end)
            if self.going and key.startswith(layout.journal(0)):
                self.going = False
                compact(store, 0)
                delete(store, layout.journal(0))
                delete(store, layout.claims(0))
            return body

        def list(self, prefix, after=""):
            return store.list(prefix, after)

    assert [row.token_ids.tolist() for row in read_responses(Compacts(), 0)] == [TOKENS[r] for r in range(4)]


@pytest.mark.slow
def test_a_reader_gives_the_same_whenever_another_process_sweeps(store):
    class SweptAt(MemoryStore):
        """Another process compacts and deletes before the n-th read."""

        def __init__(self, objects, at):
            super().__init__()
            self._objects.update(objects)
            self._left = at

        def _tick(self):
            self._left -= 1
            if self._left == 0:
                compact(self, 0, SMALL)
                for prefix in (layout.journal, layout.alive_all, layout.claims):
                    delete(self, prefix(0))

        def get(self, key, start=0, end=None):
            self._tick()
            return super().get(key, start, end)

        def list(self, prefix, after=""):
            self._tick()
            return super().list(prefix, after)

    objects = {key: store.get(key) for key in store.list("")}
    for part_tokens in (PART_TOKENS, 8, 1):
        for at in range(1, 60):
            swept = SweptAt(objects, at)
            rows = [row for rows in read_parts(swept, 0, part_tokens) for row in rows]
            assert [row.token_ids.tolist() for row in rows] == [TOKENS[r] for r in range(4)], (part_tokens, at)
        assert swept._left > 0, "every read was disturbed once"


def test_no_plan_no_responses(store):
    with pytest.raises(ObjectMissing, match=r"000007/plan\.json"):
        list(read_responses(store, 7))
    assert read_batches(store, 7) == []
    assert [batch.number for batch in read_batches(store, 0)] == [0, 1]


def wants(store, groups):
    """Change the plan to one that wants so many groups."""
    plan = replace(read_plan(store, 0), groups_wanted=groups)
    records.put(store, layout.plan(0), plan)
    return plan


def test_unused_responses_are_neither_compacted_nor_read_and_the_others_stay_as_they_are():
    store = MemoryStore()
    plan = plan_iteration(store, 0)
    roll_out(store, plan)
    grade(store, plan, 0, (0, 1))
    assert [row.reward for row in read_responses(store, 0)] == [0.0, 0.25, None, None]
    plan = wants(store, 1)
    live = list(read_responses(store, 0))
    assert [row.response for row in live] == [0, 1]
    compact(store, 0)
    delete(store, layout.journal(0))
    compacted = list(read_responses(store, 0))
    assert all(a.equals(b) for a, b in zip(live, compacted, strict=True))


def test_filtered_responses_are_kept_with_their_rewards(store):
    wants(store, 2)
    key = layout.batch(0, 0)
    batch = records.read(store, BatchRecord, key)
    records.put(store, key, replace(batch, responses=(), filtered=batch.responses))
    live = list(read_responses(store, 0))
    compact(store, 0)
    delete(store, layout.journal(0))
    compacted = list(read_responses(store, 0))
    assert all(a.equals(b) for a, b in zip(live, compacted, strict=True))
    assert [row.reward for row in compacted] == [0.0, 0.25, 0.5, 0.75]


def test_what_is_unused_depends_on_the_plan_and_on_the_last_group_recorded(store):
    first, second = (batch.responses for batch in reversed(read_batches(store, 0)))
    plan = wants(store, 1)
    assert unused_responses(plan, first, ()) == range(2, 4)
    assert len(unused_responses(plan, first, second)) == len(unused_responses(plan, (), first)) == 0
    assert len(unused_responses(plan, second, ())) == 0  # not those before it
    assert len(unused_responses(replace(plan, groups_wanted=2), first, ())) == 0
    assert len(unused_responses(replace(plan, groups_wanted=None), first, ())) == 0


@pytest.mark.parametrize("change", CHANGES[-2:], ids="+".join)
def test_turns_are_read_as_they_are_stored(store, change):
    store_changed(store, change)
    first = next(iter(read_responses(store, 0)))
    assert all(np.array_equal(getattr(first, name), value) for name, value in change.items())
