"""Scorers of `teacher.pool` in a simulated run: what they cost, and when the trainer waits for them."""

from dataclasses import replace

import pytest

from storage.records.records import TRAIN_POOL
from tasks.forecasting.results import SimulatedIteration
from tasks.forecasting.scenario import PhaseScenario, Scenario
from tasks.forecasting.scorers import ScorersScenario
from tasks.forecasting.simulate import simulate
from tests.simulated_scenarios import a_pool, a_scenario, a_trainer, all_alike

GROUPS, TOKENS = 8, 4 * 500


def scored(scenario: Scenario, **changes) -> Scenario:
    scorers = ScorersScenario(name="teachers", count=2, usd_per_h=7.2, score_s_per_token=0.0001)
    return replace(scenario, scorers=replace(scorers, **changes))


def plain(streaming: bool = True, **trainer) -> Scenario:
    """Two members decode eight groups of 2,000 tokens; a group is trained in two seconds."""
    return a_scenario(
        a_pool(2),
        trainer=a_trainer(**trainer),
        lengths=all_alike(500),
        groups=GROUPS,
        iterations=1,
        streaming=streaming,
    )


def first(scenario: Scenario) -> SimulatedIteration:
    return simulate(scenario, seed=1).iterations[0]


def test_without_scorers_the_forecast_knows_no_pool_of_theirs():
    assert set(first(plain()).usd) == {"rollout", TRAIN_POOL}


def test_fast_scorers_hardly_delay_and_are_paid_from_the_plan_to_the_last_score():
    without, found = first(plain()), first(scored(plain()))
    # The last groups end together: 0.2 s of scoring each, four of them one after another on two machines.
    assert without.duration_s < found.duration_s < without.duration_s + 1.0
    parts = found.seconds["teachers"]
    assert parts["prefill"] == pytest.approx(GROUPS * TOKENS * 0.0001)
    paid_s = 2 * (found.rollout_s + GROUPS / 2 / 2 * TOKENS * 0.0001)
    assert sum(parts.values()) == pytest.approx(paid_s, rel=0.1)
    assert sum(found.usd["teachers"].values()) == pytest.approx(sum(parts.values()) / 3600 * 7.2)
    assert found.gpu_s == pytest.approx(without.gpu_s + sum(parts.values()), rel=0.1)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_slow_scorers_limit_the_iteration_by_their_number(count, streaming):
    slow = scored(plain(streaming), count=count, score_s_per_token=0.01)
    found = first(slow)
    # 20 s for a group, and the trainer waits meanwhile; it trains the last ones at the end.
    busy_s = GROUPS * TOKENS * 0.01 / count
    trained_s = TOKENS * 0.001 * (1 if streaming else GROUPS)
    assert busy_s + trained_s < found.duration_s < busy_s + found.rollout_s + GROUPS * TOKENS * 0.001 + 2.1
    assert found.seconds["teachers"]["idle"] < count * found.rollout_s + 1e-6
    assert found.train_s == pytest.approx(GROUPS * TOKENS * 0.001 + 2.0)
    assert found.tokens == GROUPS * TOKENS


def test_scorers_start_before_they_score():
    found = first(scored(plain(), start_s=300.0, process_s=50.0))
    assert found.duration_s > 350.0
    parts = found.seconds["teachers"]
    assert (parts["starting"], parts["process"]) == (600.0, 100.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_staleness": 1},
        {"crew": "standing", "max_staleness": 1},
        {"in_order": True},
    ],
    ids=str,
)
def test_all_groups_are_scored_before_an_iteration_ends(changes):
    scenario = a_scenario(a_pool(2), groups=GROUPS, iterations=3, **changes)
    found = simulate(scored(scenario, score_s_per_token=0.005), seed=1).iterations
    assert len(found) == 3
    for each in found:
        assert each.seconds["teachers"]["prefill"] == pytest.approx(each.tokens * 0.005)
        assert each.seconds[TRAIN_POOL]["train"] == pytest.approx(each.tokens * 0.001 + 2.0)


def test_machines_of_a_phase_come_by_recorded_groups_and_wait_for_scores():
    phase = PhaseScenario(start_share=0.5, start_s=1.0)
    without = first(plain(phase=phase))
    found = first(scored(plain(phase=phase), score_s_per_token=0.01))
    assert found.wait_train_s > without.wait_train_s + 10
    assert found.train_s == pytest.approx(without.train_s)
