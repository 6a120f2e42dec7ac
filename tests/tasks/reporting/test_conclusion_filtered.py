"""Concluding iterations with dynamic sampling: filtered groups count, unused ones are told apart."""

from dataclasses import replace

import pytest

from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import BatchRecord
from tasks.reporting.verification import IntegrityError
from tests.tasks.reporting.test_conclusion import PLAN, an_iteration, change, conclude, graded


def wanting(groups, deciding=None, **batch):
    """The same iteration, whose plan wants so many groups, and its only batch: responses, and which are filtered."""
    store = an_iteration()
    config = PLAN.config | {"algorithm": {"filter_groups_reward": deciding}}
    records.put(store, layout.plan(0), replace(PLAN, groups_wanted=groups, config=config))
    for key in store.list(layout.batches(0)):
        store.delete(key)
    named = {part: tuple(graded(store, response) for response in numbers) for part, numbers in batch.items()}
    records.put(store, layout.batch(0, 0), BatchRecord(iteration=0, number=0, **{"responses": ()} | named))
    return store


def filter_numbers(report):
    return {name: value for name, value in report.metrics.items() if name.startswith("filter_groups/")}


def test_filtered_responses_are_reported_with_the_trained_ones():
    report = conclude(wanting(2, responses=[0, 1], filtered=[2, 3]))
    assert (report.rewards, report.lengths, report.next_prompt) == ((1.0, 0.0, 0.5, 0.5), (5, 4, 6, 1), 8)
    assert filter_numbers(report) == {
        "filter_groups/filtered": 1.0,
        "filter_groups/missing": 1.0,
        "filter_groups/unused_tokens": 0.0,
    }
    plain = conclude(an_iteration()).metrics
    assert {name: value for name, value in report.metrics.items() if name in plain} == plain
    assert sum(life.tokens_kept for life in report.lives) == 16


def test_unused_responses_are_counted_apart_and_their_prompts_come_again():
    report = conclude(wanting(1, responses=[0, 1]))
    assert (report.rewards, report.lengths, report.next_prompt) == ((1.0, 0.0), (5, 4), 7)
    assert filter_numbers(report) == {
        "filter_groups/filtered": 0.0,
        "filter_groups/missing": 0.0,
        "filter_groups/unused_tokens": 7.0,
    }
    assert [life.tokens_unused for life in report.lives] == [0, 0, 7]
    assert [life.tokens_regenerated for life in report.lives] == [4, 0, 0]
    assert [life.tokens_kept for life in report.lives] == [3, 6, 0]
    assert (report.metrics["frac_reward_zero_std"], report.metrics["num_tokens"]) == (0.0, 9.0)


@pytest.mark.slow
@pytest.mark.parametrize(("state", "unused", "regenerated"), [("gone", 7, 0), ("working", 6, 1)])
def test_what_the_closing_found_unjournalled_is_unused_and_what_a_kill_did_is_not(state, unused, regenerated):
    """Slot 1 had decoded one token of response 3 when it was stopped."""
    store = wanting(1, responses=[0, 1])
    store.delete(layout.shard(0, "00001-c", 1))
    key = layout.alive(0, "00001-c")
    records.put(store, key, replace(records.read(store, HeartbeatRecord, key), state=state))
    life = conclude(store).lives[2]
    assert (life.tokens_unused, life.tokens_regenerated) == (unused, regenerated)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "batch", "message"),
    [
        (2, {"responses": [0, 1]}, r"never: \[2, 3\]"),
        (1, {"filtered": [2, 3]}, r"never: \[0, 1\]"),
        (2, {"responses": [0, 1], "filtered": [2]}, r"never: \[3\]"),
        (2, {"responses": [0, 1], "filtered": [1, 2, 3]}, r"trained more than once: \[1\]"),
        (None, {"responses": [0, 1], "filtered": [2, 3]}, "response 2 is filtered; allowed: none"),
        (2, {"responses": [0, 1, 2, 3]}, "response 2: trained, although group 1 has no two different rewards"),
        (1, {"filtered": [0, 1, 2, 3]}, "response 0: filtered, although group 0 has different rewards"),
        (2, {"responses": [0], "filtered": [1, 2, 3]}, "response 1: filtered, although group 0 has different"),
    ],
)
def test_a_division_that_the_plan_does_not_allow_is_refused(groups, batch, message):
    store = wanting(groups, **batch)
    with pytest.raises(IntegrityError, match=message):
        conclude(store)
    assert layout.report(0) not in store.list("")


def test_the_named_reward_decides_which_groups_are_filtered():
    """The reward differs in both groups, and the value of "style" only in the first, where one is missing."""
    for deciding in ("style", "exact"):
        assert conclude(wanting(2, deciding, responses=[0, 1], filtered=[2, 3])).rewards == (1.0, 0.0, 0.5, 0.5)
    stores = [wanting(2, deciding, responses=[0, 1, 2, 3]) for deciding in (None, "style")]
    for store in stores:
        change(store, 3, reward=0.25)
    assert conclude(stores[0]).rewards == (1.0, 0.0, 0.5, 0.25)
    with pytest.raises(IntegrityError, match="response 2: trained, although group 1 has no two different rewards"):
        conclude(stores[1])


def test_more_groups_than_are_wanted_are_refused():
    store = wanting(1, responses=[0, 1, 2, 3])
    change(store, 3, reward=0.25)
    with pytest.raises(IntegrityError, match="2 groups are trained; allowed: the 1 wanted"):
        conclude(store)
