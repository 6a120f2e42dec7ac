"""Claims, journal and assembly together: one unique answer, whatever interleaving of workers wrote the journal."""

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.journal.assembly import Assembled, JournalReader
from storage.journal.claims import ClaimBook, Owner, take_over
from storage.journal.journal import ShardReader
from storage.journal.shard import Finish, Origin, Row, encode_shard
from storage.records import layout, records
from storage.records.records import ClaimRecord, PlanRecord, SamplingParams, SlotPlan
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, StoreUnavailable
from tests.journals import Writer

GENERATIONS = 2


def a_plan(slots: int = 2, groups_per_slot: int = 2) -> PlanRecord:
    members = [tuple(range(slot, slots * groups_per_slot, slots)) for slot in range(slots)]
    return PlanRecord(
        iteration=0,
        weight_version=4,
        run_seed=0,
        num_generations=GENERATIONS,
        prompts_key="prompts",
        first_prompt=0,
        slots=tuple(SlotPlan(slot=slot, pool="rollout", groups=groups) for slot, groups in enumerate(members)),
        sampling=SamplingParams(),
        config={},
        created_at_s=0.0,
    )


def token(response: int, position: int) -> int:
    """What a keyed sampler would draw: a function of identity alone."""
    return (response * 1009 + position * 31 + 7) % 5000


def length_of(response: int) -> int:
    return 1 + (response * 7) % 12


@dataclass
class Worker:
    """An incarnation without an engine: claims a unit, writes the right tokens, may be dead or a zombie."""

    store: MemoryStore
    plan: PlanRecord
    slot: int
    name: str
    held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reader = JournalReader(self.store, self.plan)
        self.writer = Writer(self.store, self.plan.iteration, self.name, self.plan.weight_version)

    def claim(self, unit: int, predecessors: set[str], responses: tuple[int, ...] | None = None) -> bool:
        self.reader.refresh()
        won = take_over(
            self.store,
            self.plan,
            self.reader.book,
            self.reader.shards,
            unit=unit,
            incarnation=self.name,
            slot=self.slot,
            predecessors=predecessors,
            responses=responses,
        )
        if won:
            epoch = self.reader.book.epoch(unit)
            for response in self.plan.responses_of(unit):
                owner = self.reader.book.owner(response)
                if (owner.epoch, owner.incarnation) != (epoch, self.name):
                    continue
                have = self.reader.assemble(response)
                self.held.pop(response, None)
                if not have.finish.ends_response:
                    self.held[response] = (epoch, len(have.token_ids))
        return won

    def decode(self, rng: random.Random) -> None:
        for response in sorted(self.held):
            epoch, position = self.held[response]
            count = min(rng.randrange(0, 4), length_of(response) - position)
            if count:
                ends = position + count == length_of(response)
                ids = [token(response, position + k) for k in range(count)]
                finish = Finish.STOP if ends else Finish.RUNNING
                self.writer.append(response, epoch, position, ids, [-0.5] * count, finish)
                self.held[response] = (epoch, position + count)
                if ends:
                    del self.held[response]


def assert_complete(store: MemoryStore, plan: PlanRecord) -> None:
    reader = JournalReader(store, plan)
    reader.refresh()
    for response in range(plan.num_responses):
        have = reader.assemble(response)
        assert have.token_ids.tolist() == [token(response, k) for k in range(length_of(response))]
        assert have.finish == Finish.STOP
        assert have.weight_versions.dtype == np.uint32
        assert have.weight_versions.tolist() == [plan.weight_version] * length_of(response)
        again = reader.follow(response, have.lineage)
        assert np.array_equal(again.token_ids, have.token_ids)


@pytest.mark.slow
@given(st.integers(0, 2**32))
def test_any_interleaving_of_workers_assembles_to_the_same_responses(seed):
    """Kills, zombies that write on, restarts, steals of single responses, in any order."""
    rng = random.Random(seed)
    store, plan = MemoryStore(), a_plan()
    workers: list[Worker] = []
    for step in range(rng.randrange(5, 60)):
        action = rng.random()
        if action < 0.12 or not workers:
            unit = rng.randrange(len(plan.slots))
            worker = Worker(store, plan, unit, f"{unit:05d}-w{step}")
            worker.reader.refresh()
            mine = {o.incarnation for o in worker.reader.book.owners_of(unit) if o.slot == unit}
            if mine or worker.reader.book.epoch(unit) == 0:
                worker.claim(unit, mine)
                workers.append(worker)
        elif action < 0.2:
            thief = rng.choice(workers)
            thief.reader.refresh()
            response = rng.randrange(plan.num_responses)
            owner = thief.reader.book.owner(response)
            if owner is not None and owner.incarnation != thief.name:
                unit = (response // GENERATIONS) % len(plan.slots)
                thief.claim(unit, {owner.incarnation}, (response,))
        elif action < 0.6:
            rng.choice(workers).decode(rng)
        else:
            rng.choice(workers).writer.flush()
    for unit in range(len(plan.slots)):  # a last worker per unit takes everything over and ends it
        last = Worker(store, plan, unit, f"{unit:05d}-last")
        last.reader.refresh()
        last.claim(unit, {owner.incarnation for owner in last.reader.book.owners_of(unit)})
        while last.held:
            last.decode(rng)
        last.writer.flush()
    assert_complete(store, plan)


def test_what_a_zombie_writes_after_the_seal_is_void():
    store, plan = MemoryStore(), a_plan(slots=1, groups_per_slot=1)
    first, second = Worker(store, plan, 0, "00000-a"), Worker(store, plan, 0, "00000-b")
    first.claim(0, set())
    first.writer.append(0, 1, 0, [1, 2], [-1, -1], Finish.RUNNING)
    first.writer.flush()
    second.claim(0, {"00000-a"})
    first.writer.append(0, 1, 2, [99], [-1], Finish.STOP)
    first.writer.flush()
    reader = JournalReader(store, plan)
    reader.refresh()
    assert reader.assemble(0).token_ids.tolist() == [1, 2]
    assert reader.assemble(0).finish == Finish.RUNNING


def test_one_of_two_racing_claims_wins_and_the_loser_knows_it():
    store, plan = MemoryStore(), a_plan(slots=1)
    a, b = Worker(store, plan, 0, "00000-a"), Worker(store, plan, 0, "00000-b")
    a.reader.refresh()
    b.reader.refresh()
    outcomes = [
        take_over(store, plan, w.reader.book, w.reader.shards, unit=0, incarnation=w.name, slot=0, predecessors=set())
        for w in (a, b)
    ]
    assert outcomes == [True, False]
    assert b.reader.book.owner(0).incarnation == "00000-a"


def test_a_gap_in_a_response_is_named():
    store, plan = MemoryStore(), a_plan(slots=1)
    worker = Worker(store, plan, 0, "00000-a")
    worker.claim(0, set())
    worker.writer.append(0, 1, 3, [1], [-1.0], Finish.RUNNING)
    worker.writer.flush()
    worker.reader.refresh()
    with pytest.raises(CorruptObject, match=r"00000-a/00000000\.arrow.*continues at 3, expected 0"):
        worker.reader.assemble(0)


def test_a_foreign_weight_version_is_named():
    store, plan = MemoryStore(), a_plan(slots=1)
    worker = Worker(store, plan, 0, "00000-a")
    worker.claim(0, set())
    writer = Writer(store, 0, "00000-a", weight_version=3)
    writer.append(0, 1, 0, [1], [-1.0], Finish.RUNNING)
    writer.flush()
    worker.reader.refresh()
    with pytest.raises(CorruptObject, match="weight version 3, the plan names 4"):
        worker.reader.assemble(0)


def turn_row(start: int, tokens: int, finish: Finish = Finish.RUNNING, *, event: bytes | None = None) -> Row:
    """A row of response 0: of the policy, or with an event of an observation."""
    origin = Origin.POLICY if event is None else Origin.OBSERVATION
    ids = np.arange(start, start + tokens, dtype=np.uint32)
    logprobs = np.full(0 if event else tokens, -1.0, np.float32)
    return Row(0, 1, start, ids, logprobs, 0, finish, origin, event)


def assembled_rows(*rows: Row) -> Assembled:
    """Response 0, after its member wrote these rows, each as a shard."""
    store, plan = MemoryStore(), a_plan()
    worker = Worker(store, plan, 0, "00000-a")
    assert worker.claim(0, set())
    for sequence, row in enumerate(rows):
        body = encode_shard([replace(row, weight_version=plan.weight_version)])
        store.create(layout.shard(0, "00000-a", sequence), body)
    reader = JournalReader(store, plan)
    reader.refresh()
    return reader.assemble(0)


def test_turns_are_stretches_of_policy_and_observation():
    found = assembled_rows(
        turn_row(0, 2),
        turn_row(2, 1, Finish.ACTING),
        turn_row(3, 4, event=b"first"),
        turn_row(7, 2, Finish.ACTING),
        turn_row(9, 0, Finish.STOP, event=b"second"),
    )
    assert found.token_ids.tolist() == list(range(9))
    assert (found.origins, found.events, found.owes) == ((3, 4, 2), (b"first", b"second"), False)
    assert (len(found.logprobs), found.policy_length, found.finish) == (5, 5, Finish.STOP)


def test_a_turn_is_owed_an_answer_even_after_its_release():
    found = assembled_rows(turn_row(0, 2, Finish.ACTING), turn_row(2, 0, Finish.RELEASED))
    assert (found.owes, found.finish, found.origins) == (True, Finish.RELEASED, (2,))


def test_a_response_that_begins_again_keeps_only_what_follows():
    found = assembled_rows(
        turn_row(0, 2, Finish.ACTING),
        turn_row(2, 3, event=b"first"),
        turn_row(5, 1, Finish.ACTING),
        turn_row(6, 0, Finish.AGAIN, event=b"gone"),
        turn_row(0, 3),
    )
    assert found.token_ids.tolist() == [0, 1, 2]
    assert (found.origins, found.events, found.restarts, found.owes) == ((3,), (), 1, False)


WRONG_TURNS = {
    "an observation where the policy has the turn": [turn_row(0, 2), turn_row(2, 1, event=b"x")],
    "goes on although its turn is not answered": [turn_row(0, 2, Finish.ACTING), turn_row(2, 1)],
    "which had ended": [turn_row(0, 1, Finish.ACTING), turn_row(1, 0, Finish.FAILED, event=b"x"), turn_row(1, 1)],
    "continues at 2, expected 0": [
        turn_row(0, 2, Finish.ACTING),
        turn_row(2, 0, Finish.AGAIN, event=b"x"),
        turn_row(2, 1),
    ],
}


@pytest.mark.parametrize("reason", WRONG_TURNS)
def test_rows_that_no_conversation_has_are_refused(reason):
    with pytest.raises(CorruptObject, match=reason):
        assembled_rows(*WRONG_TURNS[reason])


def test_a_claim_on_a_response_without_sealing_its_owner_is_refused():
    store, plan = MemoryStore(), a_plan(slots=1)
    Worker(store, plan, 0, "00000-a").claim(0, set())
    bad = ClaimRecord(unit=0, epoch=2, incarnation="x", slot=1, responses=(0,), sealed={})
    records.commit(store, layout.claim(0, 0, 2), bad)
    with pytest.raises(CorruptObject, match="without sealing"):
        ClaimBook(store, plan).refresh()


def test_an_owner_of_a_later_epoch_than_its_successor_is_a_broken_invariant():
    """Applying a log in order cannot lead there; this bug is put in."""
    store, plan = MemoryStore(), a_plan(slots=1)
    Worker(store, plan, 0, "00000-a").claim(0, set())
    book = ClaimBook(store, plan)
    book.refresh()
    book._owners = {response: Owner(9, "00000-a", 0) for response in book._owners}
    with pytest.raises(AssertionError, match="goes back to its owner"):
        book.apply(ClaimRecord(unit=0, epoch=2, incarnation="x", slot=0, responses=None, sealed={"00000-a": -1}))


def test_a_missing_claim_in_the_log_is_refused():
    store, plan = MemoryStore(), a_plan(slots=1)
    bad = ClaimRecord(unit=0, epoch=2, incarnation="x", slot=0, responses=None, sealed={})
    records.commit(store, layout.claim(0, 0, 2), bad)
    with pytest.raises(CorruptObject, match="a claim is missing"):
        ClaimBook(store, plan).refresh()


class LosesAnswers(MemoryStore):
    """Writes, and says that it could not."""

    def create(self, key: str, body: bytes) -> bool:
        super().create(key, body)
        raise StoreUnavailable("the answer was lost")


def test_a_lost_answer_to_a_flush_is_resolved():
    store = LosesAnswers()
    writer = Writer(store, 0, "00000-a", 0)
    writer.append(0, 1, 0, [1, 2, 3], [-1.0] * 3, Finish.RUNNING)
    assert writer.flush() == 3


class FailsOnce(MemoryStore):
    """Refuses the first write before it has any effect."""

    failed = False

    def create(self, key: str, body: bytes) -> bool:
        if not self.failed:
            self.failed = True
            raise StoreUnavailable("try later")
        return super().create(key, body)


def test_a_failed_flush_is_offered_again_under_the_same_number_with_nothing_lost():
    store = FailsOnce()
    writer = Writer(store, 0, "00000-a", 0)
    writer.append(0, 1, 0, [1, 2], [-1.0] * 2, Finish.RUNNING)
    with pytest.raises(StoreUnavailable):
        writer.flush()
    writer.append(0, 1, 2, [3], [-1.0], Finish.RUNNING)
    assert writer.flush() == 3
    reader = ShardReader(store, 0)
    assert reader.advance("00000-a") == 1
    assert [row.token_ids.tolist() for _, row in reader.rows("00000-a", 1, 0)] == [[1, 2], [3]]


@pytest.mark.parametrize("parallel_reads", [1, 8])
def test_long_journals_are_read_in_parts(parallel_reads):
    store = MemoryStore()
    for name, shards in (("00000-a", 20), ("00001-b", 3)):
        writer = Writer(store, 0, name, 0)
        for start in range(shards):
            writer.append(0, 1, start, [start], [-1.0], Finish.RUNNING)
            writer.flush()
    reader = ShardReader(store, 0, parallel_reads)
    names = ("00000-a", "00001-b")
    parts = 0
    while not reader.advance_some(names, 8):
        parts += 1
        assert reader.last_sequence("00000-a") == 4 * parts - 1
        assert reader.last_sequence("00001-b") == 2
    assert parts == 5
    assert [row.start for _, row in reader.rows("00000-a", 1, 0)] == list(range(20))


def test_tokens_that_could_not_be_encoded_come_before_later_ones(monkeypatch):
    store = MemoryStore()
    writer = Writer(store, 0, "00000-a", 0)
    writer.append(0, 1, 0, [1, 2], [-1.0] * 2, Finish.RUNNING)
    with monkeypatch.context() as short:
        short.setattr("storage.journal.journal.encode_shard", lambda _: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            writer.flush()
    assert store.list("") == []
    writer.append(0, 1, 2, [3], [-1.0], Finish.RUNNING)
    assert writer.flush() == 3
    reader = ShardReader(store, 0)
    reader.advance("00000-a")
    assert [row.start for _, row in reader.rows("00000-a", 1, 0)] == [0, 2]


def test_two_processes_under_one_incarnation_are_found_out():
    store = MemoryStore()
    for _ in range(2):
        writer = Writer(store, 0, "00000-a", 0)
        writer.append(0, 1, 0, [random.randrange(1000)], [-1.0], Finish.RUNNING)
        if store.list(layout.journal(0)):
            writer.append(0, 1, 1, [5], [-1.0], Finish.RUNNING)
            with pytest.raises(ConflictingRecord, match="same incarnation"):
                writer.flush()
        else:
            writer.flush()


def test_appending_out_of_place_is_a_programming_error():
    writer = Writer(MemoryStore(), 0, "00000-a", 0)
    writer.append(0, 1, 0, [1], [-1.0], Finish.RUNNING)
    with pytest.raises(ValueError, match="expected 1"):
        writer.append(0, 1, 2, [1], [-1.0], Finish.RUNNING)
