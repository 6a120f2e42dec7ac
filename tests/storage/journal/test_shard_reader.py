"""A reader of shards that keeps the rows of a part at a time."""

import pytest

from storage.journal.assembly import unended_responses
from storage.journal.journal import ShardReader
from storage.journal.shard import Finish
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing
from tests.journals import Incarnation, Writer, a_plan


@pytest.mark.parametrize("parallel_reads", [1, 2, 32])
def test_a_reader_that_is_turned_to_a_part_holds_its_rows_and_no_others(parallel_reads):
    """Two members with 4 responses each; shard n of each has tokens of its responses n - 1 and n."""
    store = MetersGets()
    for name, first in (("00000-a", 0), ("00001-b", 4)):
        writer = Writer(store, 0, name, 0)
        for shard in range(5):
            for response in (shard - 1, shard):
                if response in range(4):
                    finish = Finish.STOP if response < shard else Finish.RUNNING
                    tokens = [first + response] * 2
                    writer.append(first + response, 1, 2 * (shard - response), tokens, [-1.0] * 2, finish)
            writer.flush()
    names = ("00000-a", "00001-b")
    reader = ShardReader(store, 0, parallel_reads, kept=range(2))
    reader.advance_all(names)
    totals = [reader.tokens(name) for name in names], sorted(reader.ended)
    assert totals == ([16, 16], list(range(8)))
    # Responses 3 and 4 are in the last two shards of one member and the first two of the other.
    for part, shards in ((range(2), 0), (range(2, 4), 3), (range(3, 5), 4), (range(8, 9), 0), (range(8), 10)):
        store.gets = 0
        reader.turn_to(part)
        assert store.gets == shards
        for response in range(8):
            rows = reader.rows(names[response // 4], 1, response)
            assert [row.start for _, row in rows] == ([0, 2] if response in part else [])
            assert all(row.token_ids.tolist() == [response] * 2 for _, row in rows)
            assert all(row.token_ids.base is None for _, row in rows)
        assert totals == ([reader.tokens(name) for name in names], sorted(reader.ended))
        assert [reader.last_sequence(name) for name in names] == [4, 4]
    store.delete(layout.shard(0, "00000-a", 4))
    reader.turn_to(range(2))
    with pytest.raises(ObjectMissing, match=r"00000-a/00000004"):
        reader.turn_to(range(3, 4))


class MetersGets(MemoryStore):
    """Counts reads."""

    gets = 0

    def get(self, key, start=0, end=None):
        self.gets += 1
        return super().get(key, start, end)


def test_a_reader_of_all_rows_cannot_be_turned():
    with pytest.raises(ValueError, match="kept: value None; allowed: a range of responses"):
        ShardReader(MemoryStore(), 0).turn_to(range(1))


def test_what_has_not_ended_is_known_without_tokens_and_up_to_the_last_shard_that_a_seal_counts():
    store, plan = MemoryStore(), a_plan(1, 3)
    before = Incarnation(store, plan, 0, "00000-a")
    before.write(1, [4], Finish.RUNNING)
    before.write(0, [5])
    assert unended_responses(store, plan) == [1, 2]
    after = Incarnation(store, plan, 0, "00000-b")
    before.write(1, [6])  # void
    assert unended_responses(store, plan) == [1, 2]
    after.write(2, [7], Finish.LENGTH)
    assert unended_responses(store, plan) == [1]
