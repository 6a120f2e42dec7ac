"""Scorers of `teacher.pool`: the bits of the trainer's own teacher, whoever is killed, late, first or damaged."""

import random
import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from storage.clock import ManualClock, SystemClock
from storage.journal.liveness import read_heartbeat
from storage.journal.retention import settle
from storage.journal.shard import decode_shard, encode_shard
from storage.records import layout, records
from storage.records.records import BatchRecord, TrainingRecord
from storage.records.run import read_plan
from storage.records.teacher_scores import decode_scores
from storage.stores.memory import NestedStore
from storage.stores.store import CorruptObject
from storage.weights import tensor_sets
from tasks.configuration.iteration_config import config_in_force
from tasks.learning.journal_follower import GroupTimeout
from tasks.learning.score_iteration import score_iteration
from tasks.learning.score_journal import ScoreJournal
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.session.session_outcome import Preempted
from tests.dying_store import DiesAtWrite, Killed
from tests.scored_run import SCORING, URL, claims_of, opened, session, settings
from tests.small_run import (
    PRICES_USD_PER_H,
    commit_iteration,
    everything,
    learned,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[None, 4], ids=["sampled", "head"])
def top_k(request):
    return request.param


@pytest.fixture(scope="module")
def rolled_out(top_k, model, larger):
    """All objects of a run whose first rollout has ended, and whose teacher has a pool."""
    store = memory_store("scored")
    plan_iteration(settings(model, {"path": str(larger), "top_k": top_k, "pool": "teachers"}))
    roll_out(URL, 0)
    return everything(store)


@pytest.fixture(scope="module")
def in_process(top_k, model, larger):
    """The same run, whose trainer has scored itself, and trained."""
    store = memory_store("scored")
    plan_iteration(settings(model, {"path": str(larger), "top_k": top_k}))
    roll_out(URL, 0)
    train_small(URL, 0)
    return store


def batch_scores(store):
    keys = [key for key in store.list(layout.iteration(0)) if "/teacher/" in key]
    return {key: store.get(key) for key in keys}


def score_shards(store):
    return [key for key in store.list(SCORING) if key.endswith(".arrow")]


def counted_rows(store):
    """What stands for the scores of each response, as claims count it."""
    plan = read_plan(store, 0)
    config = config_in_force(store, plan)
    journal = ScoreJournal(store, plan, config.teacher.top_k or 0)
    journal.refresh()
    found = map(journal.reader.assemble, range(plan.num_responses))
    return {each.response: (each.token_ids.tobytes(), each.logprobs.tobytes()) for each in found}


def same_weights(left, right):
    prefix = layout.weights(1)
    return tensor_sets.read_manifest(left, prefix).tensors == tensor_sets.read_manifest(right, prefix).tensors


def trained_as_in_process(store, in_process):
    record = train_small(URL, 0)
    expected = records.read(in_process, TrainingRecord, layout.training(0))
    assert learned(record.metrics) == learned(expected.metrics)
    assert batch_scores(store) == batch_scores(in_process)
    assert same_weights(store, in_process)


def test_scores_of_the_pool_have_the_bits_of_the_trainers_own_teacher(rolled_out, in_process):
    store = opened(rolled_out)
    assert score_iteration(URL, 0, 0, lambda: False, SystemClock()) == 12
    trained_as_in_process(store, in_process)
    assert not any(key.startswith(layout.TEACHERS) for key in store.written)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_a_scorer_killed_at_any_write_is_gone_on_with_at_its_next_token(rolled_out, in_process, step):
    undisturbed = opened(rolled_out)
    session(undisturbed).run()
    writes = len(undisturbed.written)
    assert writes > 40
    for writes_done in range(0, writes, step):
        store = opened(rolled_out, writes_done)
        with pytest.raises(Killed):
            session(store).run()
        store.left = 1 << 30
        before = {key: store.get(key) for key in score_shards(store)}
        # Another machine waits until an unfinished claim is free; the next process of the same machine does not.
        has_unfinished = 0 < writes_done < writes - 1 and "/claims/" not in undisturbed.written[writes_done]
        clock = ManualClock()
        session(store, scorer=writes_done % 2, clock=clock).run()
        assert (clock.monotonic() > 30) == (has_unfinished and writes_done % 2 == 1)
        assert all(store.get(key) == body for key, body in before.items())
        assert counted_rows(store) == counted_rows(undisturbed)
    trained_as_in_process(store, in_process)


def test_two_scorers_at_once_share_the_groups(rolled_out, in_process):
    store = opened(rolled_out)
    sessions = [session(store, scorer, clock=SystemClock()) for scorer in (0, 1)]
    threads = [threading.Thread(target=each.run) for each in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(each.num_scored for each in sessions) == 12
    owners = claims_of(store)
    assert sorted(owners) == [0, 1, 2, 3]
    trained_as_in_process(store, in_process)


class LateStore(DiesAtWrite):
    """A store whose client sleeps before its k-th write, while `meanwhile` happens."""

    def __init__(self, name, objects, at, meanwhile, writes=1 << 30):
        super().__init__(name, objects, writes)
        self.at, self.meanwhile = at, meanwhile

    def _count(self, key):
        super()._count(key)
        if len(self.written) == self.at:
            self.at = -1
            self.meanwhile()


@pytest.mark.parametrize("at", [2, 5, 9])
def test_a_late_scorer_harms_nothing(rolled_out, in_process, at):
    counted = []
    store = LateStore("scored", rolled_out, at, lambda: counted.append(session(store, scorer=1).run()))
    memory_store("scored", store)
    assert session(store, scorer=0).run() + sum(counted) == 12
    # The late one comes too late for its claim, or has claimed and goes on writing; its later shards are void.
    assert any(len(keys) == 2 for keys in claims_of(store).values()) == (at > 2)
    trained_as_in_process(store, in_process)
    # What came late leaves no trace but its price.
    metrics = commit_iteration(URL, 0).metrics
    assert metrics["cost/usd_score"] == 0.0
    settle(store, 0)
    assert store.list(SCORING) == []


def test_a_scorer_that_begins_when_all_is_trained_leaves_at_once(rolled_out):
    store = opened(rolled_out)
    session(store).run()
    train_small(URL, 0)
    store.written.clear()
    assert session(store, scorer=1).run() == 0
    # A sweep may have been here already, and may not come again.
    assert store.written == []


def test_a_closed_iteration_needs_the_scores_of_its_batches_alone(rolled_out):
    trained = opened(rolled_out)
    session(trained).run()
    train_small(URL, 0)
    store = opened(rolled_out | {key: trained.get(key) for key in (layout.batch(0, 0), layout.closed(0))})
    batch = records.read(store, BatchRecord, layout.batch(0, 0))
    assert session(store).run() == len(batch.responses) < 12


def test_a_notice_ends_a_scorer_whose_groups_are_free_at_once(rolled_out):
    store = opened(rolled_out)
    given = iter([False, False, False])
    with pytest.raises(Preempted):
        session(store, notice=lambda: next(given, True)).run()
    assert score_shards(store)
    clock = ManualClock()
    session(store, scorer=1, clock=clock).run()
    assert clock.monotonic() < 5


def rewritten(store, key, change):
    rows = [replace(row, **change(row)) for row in decode_shard(key, store.get(key))]
    store.delete(key)
    store.create(key, encode_shard(rows))


PLANTED = {
    "damaged": (None, "is corrupt"),
    "of_another_response": (lambda row: {"token_ids": row.token_ids[::-1].copy()}, "are of other tokens than its own"),
    "shifted": (lambda row: {"start": row.start + 1}, "continues at"),
    "not_finite": (lambda row: {"logprobs": row.logprobs * float("inf")}, "are not finite"),
    "of_another_width": (
        lambda row: {"token_ids": row.token_ids[:-1], "logprobs": row.logprobs[:-1]},
        "heads of another number of tokens|continues at",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_shard_that_cannot_be_is_refused_by_its_key(rolled_out, fault):
    store = opened(rolled_out)
    session(store, shard_tokens=4096).run()
    change, reason = PLANTED[fault]
    key = score_shards(store)[0]
    if change is None:
        body = store.get(key)
        store.put(key, body[:-9] + b"x" + body[-8:])
    else:
        rewritten(store, key, change)
    with pytest.raises(CorruptObject, match=reason) as caught:
        train_small(URL, 0)
    assert caught.value.key == key
    assert batch_scores(store) == {}


def test_without_a_scorer_the_wait_ends_in_a_line_that_says_what_for(rolled_out, model, larger, top_k):
    store = memory_store("scored")
    config = settings(model, {"path": str(larger), "top_k": top_k, "pool": "teachers"}, run={"num_prompts_per_step": 2})
    plan_iteration(replace(config, trainer=replace(config.trainer, group_timeout_s=0.3)))
    roll_out(URL, 0)
    with pytest.raises(GroupTimeout) as caught:
        train_small(URL, 0)
    assert str(caught.value).startswith(
        "iteration 0: no scorer of pool 'teachers' (teacher.pool) has written anything for 0 s "
        "(trainer.group_timeout_s); waiting for response 0 (0 tokens scored, not claimed), "
    )
    assert "\n" not in str(caught.value)
    # The trainer goes on once a scorer has come.
    session(store).run()
    train_small(URL, 0)


def test_a_trainer_waits_until_the_scores_come(rolled_out, in_process):
    store = opened(rolled_out)
    late = threading.Timer(1.5, lambda: score_iteration(URL, 0, 0, lambda: False, SystemClock()))
    late.start()
    record = train_small(URL, 0)
    late.join(60)
    assert record.metrics["timing_s/wait"] > 1
    assert batch_scores(store) == batch_scores(in_process)


def test_without_a_pool_in_force_a_scorer_leaves(in_process):
    memory_store("scored", DiesAtWrite("scored", everything(in_process), 0))
    assert score_iteration(URL, 0, 0, lambda: False, SystemClock()) == 0


def test_a_replay_needs_no_scorer(rolled_out):
    store = opened(rolled_out)
    session(store).run()
    train_small(URL, 0)
    kept = {key: body for key, body in everything(store).items() if not key.startswith(SCORING)}
    kept = {key: body for key, body in kept.items() if "training.json" not in key and "0001/" not in key}
    again = opened(kept)
    train_small(URL, 0)
    assert same_weights(store, again)


def test_what_scorers_cost_is_in_the_report(rolled_out, in_process):
    store = opened(rolled_out)
    session(store).run()
    [key] = store.list(SCORING + layout.alive_all(0))
    within = NestedStore(store, SCORING.rstrip("/"))
    beat = read_heartbeat(within, key.removeprefix(SCORING))
    records.put(within, key.removeprefix(SCORING), replace(beat, started_at_s=100.0, updated_at_s=100.0 + 2 * 3600))
    train_small(URL, 0)
    prices = PRICES_USD_PER_H | {"teachers": 3.0}
    metrics = conclude_iteration(store, 0, prices, SystemClock()).metrics
    assert metrics["cost/usd_score"] == pytest.approx(6.0)
    payees = ("rollout", "train", "score", "requests", "egress", "control")
    assert metrics["cost/usd_iter"] == pytest.approx(sum(metrics[f"cost/usd_{name}"] for name in payees))
    assert metrics["cost/usd_run"] == pytest.approx(metrics["cost/usd_iter"])
    assert metrics["cost/usd_per_mtok"] == pytest.approx(metrics["cost/usd_iter"] / metrics["num_tokens"] * 1e6)
    assert "cost/usd_score" not in commit_without_scorers(in_process)


def commit_without_scorers(store):
    again = memory_store("scored", DiesAtWrite("scored", everything(store)))
    return conclude_iteration(again, 0, PRICES_USD_PER_H, SystemClock()).metrics


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.exhaustive)], ids=["few", "many"]
)
def test_histories_of_kills_and_sleeps_end_with_the_same_scores(rolled_out, seeds):
    """Scorers sleep, are taken for dead, write on and are killed; what claims count is always the same."""
    undisturbed = opened(rolled_out)
    session(undisturbed).run()
    writes, expected = len(undisturbed.written), counted_rows(undisturbed)
    for seed in seeds:
        chance = random.Random(seed)
        objects, store = rolled_out, None
        for _ in range(3):
            store = LateStore("scored", objects, chance.randrange(1, writes), lambda: None, chance.randrange(2, writes))
            memory_store("scored", store)
            another = session(store, scorer=chance.randrange(3), shard_tokens=chance.choice([3, 7, 50]))
            store.meanwhile = another.run
            with suppress(Killed):
                session(store, scorer=chance.randrange(3), shard_tokens=chance.choice([3, 7, 50])).run()
            objects = everything(store)
        store = opened(objects)
        session(store, scorer=chance.randrange(3)).run()
        assert counted_rows(store) == expected, seed


def test_each_group_is_scored_by_the_teacher_that_its_column_names(tmp_path, model, larger):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(f'{{"prompt": "{n}+1=", "subject": "{("sums", "rest")[n % 2]}"}}' for n in range(8)))
    found = []
    for pool in ({}, {"pool": "teachers"}):
        teacher = {"paths": {"sums": str(larger), "rest": str(model)}, "column": "subject", **pool}
        store = memory_store("scored")
        plan_iteration(settings(model, teacher, data={"source": str(rows), "shuffle": False}))
        roll_out(URL, 0)
        if pool:
            session(store).run()
        train_small(URL, 0)
        found.append(batch_scores(store))
    assert found[0] == found[1]
    assert {row.teacher for key, body in found[1].items() for row in decode_scores(key, body)} == {"sums", "rest"}
