"""Predictors from what a run has seen: what each expects, how it is measured, and which is used."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.records.length_tables import PREDICTORS, LengthTable, decode_lengths, empty_table, encode_lengths
from storage.records.prompt_table import PromptRow
from tasks.configuration.planning import PlanningConfig
from tasks.planning import lengths as planning_lengths
from tasks.planning.lengths import choose_predictor, learn, predict, recent_recalls
from tasks.planning.log_normal import HIGH, high_of, spread_of
from tasks.planning.prompt_features import PromptFeatures, prompt_features
from tests.property_examples import part_of_examples

MAX = 1000


def prompts_of(*numbers: int, answers: bool = False) -> PromptFeatures:
    """Prompt k has k + 2 tokens and, if asked for, an answer of 10 k characters."""
    return prompt_features(
        [PromptRow(f"p{k}", tuple(range(10, 12 + k)), "", {"answer": "x" * 10 * k} if answers else {}) for k in numbers]
    )


def learned(prompts: PromptFeatures, *epochs: object) -> LengthTable:
    table = empty_table()
    for iteration, found in enumerate(epochs):
        table, _ = learn(table, prompts, np.array(found, dtype=float), iteration=iteration, length_max=MAX)
    return table


@pytest.mark.parametrize("name", PREDICTORS)
def test_before_anything_is_known_all_are_alike(name):
    found = predict(name, empty_table(), prompts_of(1, 20, 5, answers=True), MAX)
    assert (found.predictor, found.expected.tolist(), found.high.tolist()) == ("none", [500] * 3, [1000] * 3)


def test_history_is_each_prompts_moving_average_with_its_own_spread():
    prompts = prompts_of(1, 2, 3)
    table = learned(prompts, [[10, 10], [40, 60], [90, 90]], [[30, 30], [50, 50], [90, 90]])
    found = predict("history", table, prompts_of(3, 1, 2), MAX)
    assert found.expected == pytest.approx([90, 20, 50])
    # Of prompt 1: the variance of two epochs that differ by 20, in equal shares. Of prompt 2: half of 200.
    places = np.searchsorted(table.prompts, prompts.digests)
    assert table.deviation[places] == pytest.approx([10, 10, 0])
    assert table.count[places].tolist() == [2, 2, 2]
    assert found.high[0] == pytest.approx(90)
    assert found.high[1] > 20 * 1.5


def test_history_of_single_responses_takes_the_measured_spread():
    prompts = prompts_of(1, 2, 3, 4)
    table = learned(prompts, [[10], [20], [30], [40]])
    assert np.isnan(table.deviation).all()
    found = predict("history", table, prompts, MAX)
    assert found.expected == pytest.approx([10, 20, 30, 40])
    assert (found.high > found.expected).all()
    again = learned(prompts, [[10], [20], [30], [40]], [[10], [40], [30], [40]])
    places = np.searchsorted(again.prompts, prompts.digests)
    assert again.deviation[places] == pytest.approx([0, 10, 0, 0])


def test_unseen_prompts_fall_to_the_ranker():
    seen = prompts_of(*range(1, 20), answers=True)
    table = learned(seen, *[[[30 * k, 30 * k] for k in range(1, 20)]] * 3)
    prompts = prompts_of(4, 25, 2, answers=True)
    found, ranker = (predict(name, table, prompts, MAX) for name in ("history", "ranker"))
    places, known = np.isin(prompts.digests, table.prompts), [0, 2]
    assert np.flatnonzero(places).tolist() == known
    assert found.expected[known] == pytest.approx([120, 60])
    assert found.expected[1] == ranker.expected[1] > 400


def test_none_and_the_ranker_keep_to_the_lengths_that_were_seen():
    prompts = prompts_of(*range(1, 40))
    table = learned(prompts, *[[[10 * k, 12 * k] for k in range(1, 40)]] * 3)
    none = predict("none", table, prompts, MAX)
    assert none.expected == pytest.approx([220] * 39, rel=0.02)
    ranker = predict("ranker", table, prompts, MAX)
    assert ranker.expected.min() == pytest.approx(11, rel=1)
    assert ranker.expected.max() == pytest.approx(429, rel=0.05)
    assert np.corrcoef(ranker.expected, np.arange(39))[0, 1] > 0.9


def test_one_response_in_ten_exceeds_what_is_high():
    rng = np.random.default_rng(5)
    prompts = prompts_of(*range(1, 60))
    draws = [np.exp(np.linspace(3, 5, 59)[:, None] + rng.normal(0, 0.4, (59, 16))) for _ in range(9)]
    table = learned(prompts, *draws[:8])
    for name in PREDICTORS:
        share = (draws[8] > predict(name, table, prompts, MAX).high[:, None]).mean()
        assert 0.05 < share < 0.17, name


def test_every_predictor_is_scored_by_what_was_known_before():
    prompts = prompts_of(*range(1, 31))
    rng = np.random.default_rng(1)
    means = rng.permutation(np.arange(10, 310, 10.0))[:, None] * np.ones((1, 2))
    table, first = learn(empty_table(), prompts, means, iteration=0, length_max=MAX)
    assert set(first) == {"none"}
    assert first["none"].recall == pytest.approx(0.2)
    table, second = learn(table, prompts, means, iteration=1, length_max=MAX)
    assert set(second) == set(PREDICTORS)
    assert (second["history"].recall, second["history"].rank_correlation) == pytest.approx((1, 1))
    assert second["ranker"].rank_correlation < 0.8
    assert recent_recalls(table)["history"] == [1]
    assert len(recent_recalls(table)["none"]) == 2


def test_nothing_graded_and_one_group_teach_without_a_score():
    prompts = prompts_of(1)
    table, scored = learn(empty_table(), prompts_of(), np.zeros((0, 4)), iteration=0, length_max=MAX)
    assert (scored, table.iteration, table.learned) == ({}, 0, 0)
    table, scored = learn(table, prompts, np.array([[3.0, 4.0]]), iteration=1, length_max=MAX)
    assert (scored, table.iteration, table.learned) == ({}, 1, 1)
    assert predict("history", table, prompts, MAX).expected == pytest.approx([3.5])
    with pytest.raises(ValueError, match=r"allowed: \(1, samples\)"):
        learn(table, prompts, np.zeros((2, 4)), iteration=2, length_max=MAX)
    with pytest.raises(ValueError, match="predictor: value 'guess'"):
        predict("guess", table, prompts, MAX)


def test_the_table_is_bounded_and_forgets_what_was_seen_longest_ago(monkeypatch):
    monkeypatch.setattr(planning_lengths, "PROMPTS_MAX", 3)
    table = empty_table()
    for iteration, numbers in enumerate([(1, 2), (3, 4), (1, 5)]):
        table, _ = learn(table, prompts_of(*numbers), np.full((2, 2), 9.0), iteration=iteration, length_max=MAX)
    assert table.prompts.size == 3
    assert {1, 5} <= {k for k in range(1, 6) if prompts_of(k).digests[0] in table.prompts}
    assert prompts_of(2).digests[0] not in table.prompts


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.5))
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 4))
def test_whatever_is_learned_can_be_stored_and_is_the_same_again(seed, groups, members):
    def table_of() -> LengthTable:
        rng = np.random.default_rng(seed)
        table = empty_table()
        for iteration in range(3):
            prompts = prompts_of(*rng.integers(1, 12, groups).tolist(), answers=bool(seed % 2))
            found = np.exp(rng.normal(4, 2, (groups, members))).round()
            table, _ = learn(table, prompts, found, iteration=iteration, length_max=MAX)
        return table

    table = table_of()
    body = encode_lengths(table)
    assert body == encode_lengths(table_of())
    assert encode_lengths(decode_lengths("k", body)) == body
    for name in PREDICTORS:
        found = predict(name, table, prompts_of(1, 5, 11, 14), MAX)
        assert ((found.expected >= 1) & (found.expected <= found.high) & (found.high <= MAX)).all()


def config(**changes) -> PlanningConfig:
    return replace(PlanningConfig(), **changes)


@pytest.mark.parametrize(
    ("recalls", "changes", "chosen"),
    [
        ({}, {}, "none"),
        ({"ranker": [0.5], "none": [0.2]}, {}, "ranker"),
        ({"history": [0.6, 0.9], "ranker": [0.8]}, {}, "ranker"),
        ({"history": [0.8], "ranker": [0.8]}, {}, "history"),
        ({"history": [0.29], "ranker": [0.2], "none": [0.9]}, {}, "none"),
        ({"history": [0.9]}, {"length_predictor": "none"}, "none"),
        ({}, {"length_predictor": "ranker"}, "ranker"),
        ({"ranker": [0.4], "history": [0.9]}, {"length_predictor": "ranker"}, "ranker"),
        ({"ranker": [0.1, 0.4], "history": [0.9]}, {"length_predictor": "ranker"}, "none"),
        ({"ranker": [0.1, 0.4, 0.5]}, {"length_predictor": "ranker"}, "ranker"),
        ({"history": [0.1], "ranker": [0.9]}, {"length_predictor": "history"}, "ranker"),
    ],
)
def test_the_best_that_was_measured_is_chosen_or_the_next_weaker(recalls, changes, chosen):
    assert choose_predictor(recalls, config(**changes)) == chosen


@given(st.floats(1, 1e5), st.floats(0, 1.9))
def test_spread_and_high_are_inverse(mean, relative):
    expected = np.array([mean])
    spread = spread_of(expected, high_of(expected, relative * expected))
    assert spread == pytest.approx(min(HIGH, np.sqrt(np.log1p(relative**2))), abs=1e-5)
