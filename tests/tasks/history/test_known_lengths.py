"""What a plan expects by the tables of its run, what a conclusion learns, and that neither needs the other to go on."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from storage.records import layout
from storage.records.length_tables import PREDICTORS, newest_lengths
from storage.records.planning_records import LengthsRecord
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord, SamplingParams
from storage.stores.memory import MemoryStore
from tasks.configuration.planning import PlanningConfig
from tasks.history.known_lengths import expected_lengths, learn_lengths
from tests.journals import a_plan

GROUPS, MEMBERS, MAX = 20, 4, 400
ROWS = [PromptRow(f"p{k}", (1, 2, 3), "", {}) for k in range(GROUPS)]
# A prompt's mean length, which neither its tokens nor its columns show.
MEANS = np.random.default_rng(2).permutation(np.arange(10, 210, 10))
AUTO = PlanningConfig()


def plan_of(iteration: int, lengths: LengthsRecord | None = None) -> PlanRecord:
    sampling = SamplingParams(max_completion_length=MAX)
    return a_plan(GROUPS, MEMBERS, iteration=iteration, sampling=sampling, lengths=lengths)


def lengths_of(iteration: int) -> dict[int, int]:
    rng = np.random.default_rng(100 + iteration)
    found = MEANS[:, None] * rng.uniform(0.9, 1.1, (GROUPS, MEMBERS))
    return dict(enumerate(found.round().astype(int).flatten().tolist()))


def run_of(iterations: int) -> MemoryStore:
    store = MemoryStore()
    for iteration in range(iterations):
        learn_lengths(store, plan_of(iteration), ROWS, lengths_of(iteration))
    return store


def expected(store: MemoryStore, iteration: int, settings: PlanningConfig = AUTO):
    return expected_lengths(store, iteration, ROWS, settings, length_max=MAX)


def test_from_nothing_to_what_each_prompt_did_before():
    store = MemoryStore()
    found = expected(store, 0)
    assert (found.predictor, set(found.expected)) == ("none", {MAX / 2})
    store = run_of(2)
    found = expected(store, 2)
    assert found.predictor == "history"
    assert found.expected == pytest.approx(MEANS, rel=0.1)
    # One iteration ahead of its table it is an older one that counts; the newest one from before it is not looked at.
    assert np.array_equal(expected(store, 3).expected, found.expected)
    assert expected(store, 1).predictor == "none"


def test_metrics_of_every_predictor_and_of_what_the_plan_expected():
    store = run_of(1)
    backwards = tuple((300 - MEANS).tolist())
    said = LengthsRecord(predictor="ranker", expected=backwards, high=backwards)
    metrics = learn_lengths(store, plan_of(1, said), ROWS, lengths_of(1))
    names = {f"lengths/{name}/{kind}" for name in PREDICTORS for kind in ("recall", "rank_correlation")}
    assert set(metrics) == names | {"lengths/recall", "lengths/rank_correlation"}
    assert metrics["lengths/history/recall"] == 1
    assert metrics["lengths/none/recall"] == pytest.approx(0.2)
    assert metrics["lengths/recall"] == 0
    assert metrics["lengths/rank_correlation"] < -0.9
    assert "lengths/recall" not in learn_lengths(run_of(1), plan_of(1), ROWS, lengths_of(1))


def test_a_conclusion_that_is_repeated_says_and_writes_the_same():
    store = run_of(2)
    before = store.get(layout.lengths(1))
    assert learn_lengths(store, plan_of(1), ROWS, lengths_of(1)) == learn_lengths(
        run_of(1), plan_of(1), ROWS, lengths_of(1)
    )
    assert store.get(layout.lengths(1)) == before


def test_only_whole_groups_count():
    graded = lengths_of(0)
    # Group 3 lacks a member, and the groups from 10 on were not used.
    partial = {r: n for r, n in graded.items() if r < 10 * MEMBERS and r != 3 * MEMBERS}
    store = MemoryStore()
    metrics = learn_lengths(store, plan_of(0), ROWS, partial)
    assert newest_lengths(store, 1).prompts.size == 9
    assert metrics["lengths/none/recall"] == pytest.approx(2 / 9)
    assert learn_lengths(MemoryStore(), plan_of(0), ROWS, {}) == {}


def test_a_damaged_table_is_told_and_the_one_before_it_is_used(caplog):
    store = run_of(3)
    good = expected(store, 2)
    store.put(layout.lengths(2), b"damaged")
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(expected(store, 3).expected, good.expected)
    assert "lengths/000002.safetensors" in caplog.text


def test_without_any_table_all_are_expected_alike_and_learning_begins_anew(caplog):
    store = run_of(2)
    for iteration in range(2):
        store.put(layout.lengths(iteration), b"damaged")
    with caplog.at_level(logging.WARNING):
        assert expected(store, 2).predictor == "none"
    assert "all groups are expected alike" in caplog.text
    assert learn_lengths(store, plan_of(2), ROWS, lengths_of(2))["lengths/none/recall"] == pytest.approx(0.2)
    assert newest_lengths(store, 3).learned == 1


def test_another_table_that_is_there_already_stays(caplog):
    store = run_of(1)
    learn_lengths(store, plan_of(1), ROWS, lengths_of(5))
    theirs = store.get(layout.lengths(1))
    with caplog.at_level(logging.WARNING):
        metrics = learn_lengths(store, plan_of(1), ROWS, lengths_of(1))
    assert "a different table of learned lengths exists already" in caplog.text
    assert metrics["lengths/history/recall"] == 1
    assert store.get(layout.lengths(1)) == theirs


def test_a_predictor_whose_recall_falls_is_left_and_comes_back(monkeypatch):
    monkeypatch.setattr("tasks.planning.lengths.RECALL_MIN", 0.6)
    history = replace(AUTO, length_predictor="history")
    store = run_of(2)
    assert expected(store, 2, history).predictor == "history"
    turned = dict(enumerate(np.repeat(210 - MEANS, MEMBERS).tolist()))
    learn_lengths(store, plan_of(2), ROWS, turned)
    learn_lengths(store, plan_of(3), ROWS, lengths_of(3))
    assert newest_lengths(store, 4).recall[PREDICTORS.index("history")].min() < 0.6
    assert expected(store, 3, history).predictor == "none"
    for iteration in range(4, 8):
        learn_lengths(store, plan_of(iteration), ROWS, lengths_of(iteration))
    assert expected(store, 8, history).predictor == "history"
