"""Trainers that are there for the train phases only: against a closed form, and against the bill of a whole host."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.phase_start import Setting, iteration
from storage.records import TRAIN_POOL
from tasks.forecasting.phases import Sharers, alone, profile, shared
from tasks.forecasting.scenario import PhaseScenario, Scenario, ScenarioError, parse
from tasks.forecasting.simulate import simulate
from tasks.sharing.shared_cycles import saving, saving_bound
from tests.fleet_records import a_run
from tests.simulated_scenarios import a_pool, a_scenario, a_trainer, all_alike, some_lengths

PULL_S, TRAIN_S_PER_TOKEN, FIXED_S = 1.0, 0.001, 2.0
GROUPS, GENERATIONS, TOKENS = 20, 4, 500
# How far a forecast may be from the same thing computed in another way.
ERROR_MAX = 0.03
# The other simulator knows no phase that is shorter because it began late.
OTHER_SIMULATOR_MAX = 0.08


def one_group_after_another(phase: PhaseScenario | None, **trainer) -> Scenario:
    """Twenty groups whose ends are evenly spaced, each in 5 s and trained in 2 s."""
    return a_scenario(
        a_pool(1, responses_max=GENERATIONS),
        trainer=a_trainer(train_s_per_token=TRAIN_S_PER_TOKEN, train_fixed_s=FIXED_S, phase=phase, **trainer),
        lengths=all_alike(TOKENS),
        groups=GROUPS,
        generations=GENERATIONS,
        iterations=1,
    )


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("start_s", [0.0, 7.0])
@pytest.mark.parametrize("load_s", [0.0, 5.0])
def test_a_phase_holds_the_machines_as_long_as_the_closed_form_says(share, start_s, load_s):
    found = simulate(
        one_group_after_another(PhaseScenario(start_share=share, start_s=start_s), load_s=load_s), seed=1
    ).iterations[0]
    rollout_s = found.rollout_s
    ends_s = PULL_S + (rollout_s - PULL_S) / GROUPS * np.arange(1, GROUPS + 1)
    train_s = GROUPS * GENERATIONS * TOKENS * TRAIN_S_PER_TOKEN
    setting = Setting(sigma=0.0, busy=train_s / (train_s + rollout_s), start=(start_s + load_s) / rollout_s)
    length, held = iteration(ends_s / rollout_s, setting, share)
    assert found.duration_s == pytest.approx(length * rollout_s + FIXED_S)
    parts = found.seconds[TRAIN_POOL]
    assert sum(parts.values()) == pytest.approx(held * rollout_s + FIXED_S)
    assert parts["process"] == pytest.approx(start_s + load_s)
    assert parts["train"] == pytest.approx(train_s + FIXED_S)
    assert parts["standing"] == 0.0
    assert sum(found.usd[TRAIN_POOL].values()) == pytest.approx(sum(parts.values()) / 3600 * 36.0)


def test_machines_of_its_own_are_held_all_the_time():
    found = simulate(one_group_after_another(None), seed=1).iterations[0]
    assert sum(found.seconds[TRAIN_POOL].values()) == pytest.approx(found.duration_s)


def test_a_phase_waits_for_other_runs_unpaid_and_publishes_from_memory():
    phase = PhaseScenario(start_share=1.0, waits_s=(30.0,), publishes_beside=True)
    found = simulate(one_group_after_another(phase, load_s=5.0), seed=1).iterations[0]
    without = simulate(one_group_after_another(replace(phase, waits_s=()), load_s=5.0), seed=1).iterations[0]
    assert found.duration_s == pytest.approx(without.duration_s + 30.0)
    assert found.seconds[TRAIN_POOL] == pytest.approx(without.seconds[TRAIN_POOL])
    assert found.seconds[TRAIN_POOL]["train"] == pytest.approx(found.train_s)
    assert found.duration_s == pytest.approx(found.rollout_s + 30.0 + 5.0 + found.train_s + FIXED_S)


def test_a_phase_is_no_time_to_generate_in():
    written = a_trainer(engines=1)
    with pytest.raises(ValueError, match="engines: value 1; allowed with phase: 0"):
        replace(written, phase=PhaseScenario(start_share=0.9))
    with pytest.raises(ScenarioError, match="start_share"):
        parse({"trainer": {"phase": {"start_share": 0.0}}})


def a_rollout_of_four_members(crew: str = "iteration", ahead: int = 0, train_s_per_token: float = 0.0003) -> Scenario:
    """A phase of about a quarter of a cycle on a host, which switches in 6 s; of half a cycle if two overlap."""
    trainer = a_trainer(
        load_s=6.0,
        train_fixed_s=1.0,
        train_s_per_token=train_s_per_token,
        phase=PhaseScenario(start_share=0.9, publishes_beside=True),
    )
    return a_scenario(
        a_pool(4, process_s=10.0),
        trainer=trainer,
        lengths=some_lengths(median=800.0, cap=4000),
        groups=16,
        iterations=30,
        crew=crew,
        max_staleness=ahead,
    )


def on_a_host(scenario: Scenario, sharers: Sharers, seeds: int = 4):
    """(mean cycle, mean seconds of the host that the run pays for in a cycle, what sharing does)."""
    assert scenario.trainer.phase is not None
    placed, found = shared(scenario, scenario.trainer.phase, sharers, seeds)
    iterations = [each for seed in range(seeds) for each in simulate(placed, seed=seed).iterations[4:-2]]
    cycle_s = float(np.mean([each.duration_s for each in iterations]))
    paid_s = float(np.mean([sum(each.seconds[TRAIN_POOL].values()) for each in iterations]))
    return cycle_s, paid_s, found


@pytest.mark.parametrize("runs", [2, 3])
@pytest.mark.parametrize(("crew", "ahead"), [("iteration", 0), ("standing", 1)])
def test_like_runs_pay_for_the_whole_host_and_are_slowed_down_as_the_host_was_simulated(runs, crew, ahead):
    scenario = a_rollout_of_four_members(crew, ahead)
    assert scenario.trainer.phase is not None
    cycle_s, paid_s, found = on_a_host(scenario, Sharers(alike=runs - 1))
    # As many like runs as there are pay for each second of the host, and no more.
    assert runs * paid_s == pytest.approx(cycle_s, rel=ERROR_MAX)
    alone_s = profile(alone(scenario, scenario.trainer.phase), 4).cycle_s
    assert cycle_s / alone_s == pytest.approx(found.slowdown, rel=ERROR_MAX)
    # The like runs beside it, as production's order of phases has them in another simulator.
    assert found.slowdown == pytest.approx(found.slowdown_others, rel=OTHER_SIMULATOR_MAX)
    assert saving(found.slowdown, runs, 4.0, 8.0) <= found.saving_max == saving_bound(runs, 4.0, 8.0)


@pytest.mark.parametrize(("train_s_per_token", "error_max"), [(0.0003, 0.04), (0.0006, 0.03), (0.001, 0.03)])
@pytest.mark.parametrize(("crew", "ahead"), [("iteration", 0), ("iteration", 1), ("standing", 1), ("standing", 2)])
@pytest.mark.parametrize("runs", [2, 3])
def test_the_bills_of_a_full_host_add_up_though_much_is_between_phases(runs, crew, ahead, train_s_per_token, error_max):
    scenario = a_rollout_of_four_members(crew, ahead, train_s_per_token)
    scenario = replace(scenario, trainer=replace(scenario.trainer, train_fixed_s=10.0, control_s=5.0))
    cycle_s, paid_s, found = on_a_host(scenario, Sharers(alike=runs - 1), seeds=2)
    assert runs * paid_s == pytest.approx(cycle_s, rel=error_max)
    assert found.slowdown == pytest.approx(found.slowdown_others, rel=OTHER_SIMULATOR_MAX)


def test_idle_time_that_each_run_paid_whole_would_be_noticed():
    """The planted bug: without a division of idle time, the bills exceed the host's life."""
    scenario = a_rollout_of_four_members()
    assert scenario.trainer.phase is not None
    placed, found = shared(scenario, scenario.trainer.phase, Sharers(alike=1), 2)
    phase = placed.trainer.phase
    assert phase is not None
    assert phase.idle_share == pytest.approx(found.idle / 2)
    whole = replace(placed, trainer=replace(placed.trainer, phase=replace(phase, idle_share=found.idle)))
    iterations = simulate(whole, seed=0).iterations[2:]
    paid_s = sum(sum(each.seconds[TRAIN_POOL].values()) for each in iterations)
    assert 2 * paid_s > (1 + 3 * ERROR_MAX) * sum(each.duration_s for each in iterations)


def test_waits_that_were_forgotten_would_be_noticed():
    """The planted bug: a heavy trainer that three runs share as if each had it alone."""
    scenario = a_rollout_of_four_members(train_s_per_token=0.002)
    assert scenario.trainer.phase is not None
    cycle_s, _, found = on_a_host(scenario, Sharers(alike=2))
    alone_s = profile(alone(scenario, scenario.trainer.phase), 4).cycle_s
    assert found.slowdown_others > 1 + 3 * ERROR_MAX
    assert cycle_s / alone_s == pytest.approx(found.slowdown_others, rel=ERROR_MAX)


def test_a_run_alone_on_a_host_switches_no_state_and_pays_all_of_it():
    cycle_s, paid_s, found = on_a_host(a_rollout_of_four_members(), Sharers())
    assert (found.runs, found.slowdown, found.saving_max) == (1, pytest.approx(1.0), 0.0)
    assert paid_s == pytest.approx(cycle_s, rel=ERROR_MAX)


def test_unlike_runs_of_a_fleet_count_as_they_are_and_so_does_its_switch_time():
    scenario = a_rollout_of_four_members()
    heavy = a_run("heavy", phase_s=200.0, cycle_s=300.0)
    _, _, beside_light = on_a_host(scenario, Sharers(others=(a_run("light", phase_s=2.0, cycle_s=300.0),)), seeds=1)
    _, _, beside_heavy = on_a_host(scenario, Sharers(others=(heavy,)), seeds=1)
    _, _, slowly = on_a_host(scenario, Sharers(others=(heavy,), switch_s=60.0), seeds=1)
    assert 1 <= beside_light.slowdown < beside_heavy.slowdown < slowly.slowdown
