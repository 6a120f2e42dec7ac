"""Simulated histories of a crew: none breaks a rule, each is a function of its seed, and bugs put in are found."""

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import histories
from simulation import simulated_history
from simulation.judge import fates_of_groups
from simulation.simulated_history import draw_history
from simulation.undisturbed import Whole
from simulation.virtual_time import Process, ProcessClock, Timeline
from storage.journal import journal
from storage.journal.assembly import JournalReader
from storage.journal.journal import JournalWriter
from storage.journal.shard import Finish, encode_shard
from storage.records import layout, records
from storage.records.records import ClosedRecord, SlotPlan, Span
from storage.records.run import exists
from storage.stores.faults import Crashed
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing, StoreUnavailable, commit
from tasks.learning.recorded_batches import RecordedBatches
from tasks.sampling.session import claimant
from tests.judged_histories import drawn, is_found

pytestmark = pytest.mark.slow

SEEDS = range(50)
DIGEST = (
    "import hashlib, logging; logging.disable(); from benchmarks.histories import *; "
    "print([hashlib.md5(repr(live_and_judge(draw_history(s)).ledger.events).encode()).hexdigest() for s in range(4)])"
)


@pytest.fixture(scope="module")
def verdicts():
    return histories.run_seeds(SEEDS)


def test_no_history_breaks_a_rule(verdicts):
    assert {verdict.seed: verdict.broken for verdict in verdicts if verdict.broken} == {}


def test_the_histories_are_eventful(verdicts):
    """A simulator in which nothing goes wrong shows nothing."""
    counts = Counter()
    for verdict in verdicts:
        counts.update(verdict.counts)
    for fault in ("throttled", "request_lost", "request_late", "answer_lost", "answer_retried", "pause_before"):
        assert counts[f"fault: {fault}"] > 10, fault
    for kind in ("kill", "notice", "freeze", "suspend", "hang", "mass", "outage", "trainer kill", "trainer freeze"):
        assert counts[f"strike: {kind}"] > 3, kind
    for kind in ("denied", "full", "clock", "heartbeat"):
        assert counts[f"strike: {kind}"] > 2, kind
    for what in (
        "fault: denied",
        "fault: full",
        "joins",
        "preemptions",
        "ended: Crashed",
        "ended: Preempted",
        "rows void",
        "rows released",
    ):
        assert counts[what] > 5, what
    assert counts["engine deaths"] > 20
    assert counts["ended: EngineDied"] > 0
    assert counts["responses moved"] > counts["responses"] / 5
    assert counts["responses moved from the living"] > 20
    assert counts["groups filtered"] > 20
    assert counts["histories closed early"] > 8
    assert counts["responses unused"] > 100
    for what in ("groups wanted, not found", "responses unused, unended"):
        assert counts[what] > 3, what


def test_a_history_is_a_function_of_its_seed_and_not_of_the_process():
    def digests(hash_seed):
        command = [sys.executable, "-c", DIGEST]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert digests("1") == digests("2") != ""


def reads_nothing(_reader, _span):
    """In place of JournalReader._reach."""


def read_beyond_seals(reader, response):
    spans = reader.book.sealed(response)
    owner = reader.book.owner(response)
    if owner is not None:
        spans = (*spans, Span(epoch=owner.epoch, incarnation=owner.incarnation, last_sequence=0))
    return reader.follow(
        response, [Span(epoch=s.epoch, incarnation=s.incarnation, last_sequence=1 << 30) for s in spans]
    )


def test_a_reader_that_takes_void_rows_is_found(monkeypatch):
    monkeypatch.setattr(JournalReader, "assemble", read_beyond_seals)
    monkeypatch.setattr(JournalReader, "_reach", reads_nothing)
    assert is_found(drawn(), changed=1)


def test_overwriting_instead_of_creating_is_found(monkeypatch):
    def overwrite(store, key, body):
        return (store.put(key, body) or True) if "/claims/" in key else commit(store, key, body)

    monkeypatch.setattr("storage.records.records.commit_bytes", overwrite)
    assert is_found(drawn(), doubled=1)


def test_a_store_that_lets_two_create_one_key_is_found(monkeypatch):
    def create(store, key, body):
        fresh = key not in store._objects or "/claims/" in key
        if fresh:
            store._objects[key] = body
        return fresh

    monkeypatch.setattr(MemoryStore, "create", create)
    assert is_found(drawn(), doubled=1)


def test_a_writer_that_trusts_the_first_answer_is_found(monkeypatch):
    monkeypatch.setattr(journal, "commit", lambda store, key, body: store.create(key, body))
    assert is_found(drawn(lambda history: history.weather.answer_retried > 0.005), error=1)


class BlindShards:
    """What a thief sees that does not look."""

    def __init__(self, shards):
        self.shards = shards

    def advance(self, incarnation):
        return -1


class CountedShards(BlindShards):
    """What a thief sees that counts shards and reads none."""

    def advance(self, incarnation):
        number = self.shards.last_sequence(incarnation) + 1
        while True:
            try:
                self.shards._store.get(layout.shard(0, incarnation, number))
            except ObjectMissing:
                return number - 1
            number += 1


@pytest.mark.parametrize(("sight", "rule"), [(BlindShards, "lost"), (CountedShards, "changed")])
def test_a_thief_that_does_not_read_its_victims_shards_is_found(monkeypatch, sight, rule):
    take_over = claimant.take_over
    monkeypatch.setattr(
        claimant, "take_over", lambda store, plan, book, shards, **k: take_over(store, plan, book, sight(shards), **k)
    )
    if sight is CountedShards:
        monkeypatch.setattr(JournalReader, "_reach", reads_nothing)
    assert is_found(drawn(), **{rule: 1})


def test_a_writer_that_leaves_a_gap_is_found(monkeypatch):
    def write_once(writer):
        rows = writer._unwritten.popleft().rows(0)
        body, tokens = encode_shard(rows), sum(len(row.token_ids) for row in rows)
        key = layout.shard(writer._iteration, writer._incarnation, writer._sequence)
        writer._sequence += 1
        try:
            writer._store.create(key, body)
        except StoreUnavailable:
            return 0
        return tokens

    monkeypatch.setattr(JournalWriter, "_write_first", write_once)
    assert is_found(drawn(lambda history: history.weather.request_lost > 0.005), lost=1)


def is_divided(history):
    """Whether what is wanted takes several micro-batches, so that there is something between them."""
    return (history.plan.groups_wanted or 0) > 1 and history.micro_batch_tokens_max <= 60


def test_histories_in_which_all_groups_are_wanted_are_the_same_as_without_the_others(monkeypatch):
    drawn = [draw_history(seed) for seed in SEEDS]
    monkeypatch.setattr(simulated_history, "_draw_wanted", lambda _, plan: plan)
    assert 8 < sum(history.plan.groups_wanted is not None for history in drawn) < 25
    for history in drawn:
        plain, wanted = draw_history(history.seed), history.plan.groups_wanted is not None
        plan = replace(history.plan, groups_wanted=None, nonce=plain.plan.nonce)
        tokens_max = plain.micro_batch_tokens_max
        in_order = plain.in_plan_order if wanted else history.in_plan_order
        assert replace(history, plan=plan, in_plan_order=in_order, micro_batch_tokens_max=tokens_max) == plain


def test_the_judge_takes_groups_in_order_until_enough_have_unequal_rewards():
    """A response of one token is worth 1 if that is a multiple of 3."""
    slot = SlotPlan(slot=0, pool="rollout", groups=tuple(range(6)))
    plan = replace(draw_history(0).plan, num_generations=2, slots=(slot,))
    tokens = [(3, 6), (1, 3), (1, 2), (1, 5), (6, 1), (3, 2)]
    truth = {
        2 * group + member: Whole(np.array([token], np.uint32), np.zeros(1, np.float32), Finish.STOP)
        for group, pair in enumerate(tokens)
        for member, token in enumerate(pair)
    }

    def fates(wanted):
        return "".join(fate[0] for fate in fates_of_groups(replace(plan, groups_wanted=wanted), truth).values())

    assert [fates(wanted) for wanted in (1, 2, 3, 4)] == ["ft", "ftfft", "ftfftt", "ftfftt"]
    assert fates(None) == "tttttt"


GATHER, RECORD = RecordedBatches._gather_graded, RecordedBatches._batch


def take_whichever_is_finished_first(batches, _missing, recorded, errors):
    follower = batches._follower
    follower._config = replace(follower._config, in_plan_order=False)
    graded = batches._grade([follower.wait(batches._pending, recorded)], errors)
    return ([], graded) if len({each.reward for each in graded}) == 1 else (graded, [])


def filter_nothing(batches, missing, recorded, errors):
    kept, filtered = GATHER(batches, missing, recorded, errors)
    return [*kept, *filtered], []


def close_before_the_last_is_recorded(batches, missing, recorded, errors):
    kept, filtered = GATHER(batches, missing, recorded, errors)
    if len(batches._groups(kept)) == missing:
        records.commit(batches._store, layout.closed(0), ClosedRecord(iteration=0, reason="too early"))
    return kept, filtered


def forget_what_an_earlier_life_recorded(batches, number):
    known = exists(batches._store, layout.batch(batches._plan.iteration, number))
    batch = RECORD(batches, number)
    batches._groups_trained -= len(batches._groups(batch.responses)) if known else 0
    return batch


def complete_at(enough):
    """`enough` is told the batches and how many groups are wanted."""
    return property(lambda batches: not batches._pending or enough(batches, batches._plan.groups_wanted))


ONE_EARLY = complete_at(lambda batches, wanted: batches._groups_trained >= max(1, wanted - 1))
ONE_LATE = complete_at(lambda batches, wanted: batches._groups_trained >= wanted + 1)
COUNTS_FILTERED = complete_at(lambda batches, wanted: batches._plan.num_groups - len(batches._pending) >= wanted)
FILTER_BUGS = [
    ("_gather_graded", take_whichever_is_finished_first, "filter"),
    ("_gather_graded", filter_nothing, "filter"),
    ("_gather_graded", close_before_the_last_is_recorded, "lost"),
    ("_batch", forget_what_an_earlier_life_recorded, "filter"),
    ("_is_complete", ONE_EARLY, "lost"),
    ("_is_complete", ONE_LATE, "filter"),
    ("_is_complete", COUNTS_FILTERED, "lost"),
]
NAMES = ("arrival", "unfiltered", "closed before", "forgotten", "one early", "one late", "filtered count")


@pytest.mark.parametrize(("name", "bug", "rule"), FILTER_BUGS, ids=NAMES)
def test_a_trainer_that_filters_or_closes_wrongly_is_found(monkeypatch, name, bug, rule):
    monkeypatch.setattr(RecordedBatches, name, bug)
    assert is_found(drawn(is_divided), **{rule: 1})


def test_a_failing_seed_says_how_to_replay_it(capsys):
    failed = histories.Verdict(17, ("lost: responses [3] are in no batch",), Counter({"responses": 4}), 600.0, 0.2)
    fine = histories.Verdict(18, (), Counter({"responses": 4}), 600.0, 0.3)
    histories.report([failed, fine], 1.0, 2, True)
    out = capsys.readouterr().out
    assert "seed 17: lost: responses [3] are in no batch" in out
    assert "python -m benchmarks.histories --seed 17 --trace" in out
    assert '"failed_seeds": [17]' in out
    assert "MISSED" in out


def test_a_trace_shows_every_event_in_order(capsys):
    assert histories.trace(0)
    lines = capsys.readouterr().out.splitlines()
    moments = [float(line.split()[0]) for line in lines[:-1]]
    assert moments == sorted(moments)
    assert any("create iterations/000000/closed.json" in line for line in lines)
    assert lines[-1].startswith("seed 0: 0 rules broken")


def make_process(timeline, name, main, ends):
    process = Process(timeline, name, main, lambda process, error: ends.append((process.name, error)))
    process.clock = ProcessClock(timeline, process, random.Random(name))
    timeline.after(0.0, process.start)
    return process


def test_virtual_time_wakes_whoever_is_first_and_kills_and_freezes_where_they_wait():
    timeline, told, ends = Timeline(random.Random(0), limit_s=1000.0, turns_max=1000), [], []

    def main(process):
        for _ in range(4):
            process.sleep(10.0)
            told.append((process.name, timeline.now_s))

    make_process(timeline, "undisturbed", main, ends)
    killed = make_process(timeline, "killed", main, ends)
    frozen = make_process(timeline, "frozen", main, ends)
    timeline.at(15.0, killed.kill)
    timeline.at(25.0, lambda: frozen.freeze(100.0))
    assert timeline.run()
    assert [at_s for name, at_s in told if name == "undisturbed"] == [10.0, 20.0, 30.0, 40.0]
    assert [at_s for name, at_s in told if name == "killed"] == [10.0]
    assert [at_s for name, at_s in told if name == "frozen"] == [10.0, 20.0, 125.0, 135.0]
    assert [name for name, _ in ends] == ["killed", "undisturbed", "frozen"]
    assert isinstance(ends[0][1], Crashed)
    with pytest.raises(Crashed):
        killed.sleep(1.0)


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize(("limit_s", "turns_max"), [(50.0, 10**6), (1e9, 1000)])
def test_virtual_time_that_does_not_end_is_told(names, limit_s, turns_max):
    timeline = Timeline(random.Random(0), limit_s, turns_max)

    def main(process):
        while True:
            process.sleep(1.0)

    for name in names:
        make_process(timeline, name, main, [])
    assert not timeline.run()
