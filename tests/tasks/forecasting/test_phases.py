"""Trainers that are there for the train phases only: against a closed form, and what a forecast of them says."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from storage.records.forecast_records import ForecastRecord, SetupForecast
from storage.records.records import TRAIN_POOL
from tasks.configuration.run_config import parse
from tasks.forecasting import trainer_inputs
from tasks.forecasting.comparison import forecast, refusal
from tasks.forecasting.inputs import gather
from tasks.forecasting.probe import NoProbe
from tasks.forecasting.scenario import PhaseScenario, Scenario, ScenarioError
from tasks.forecasting.scenario import parse as parse_scenario
from tasks.forecasting.simulate import simulate
from tests.forecast_documents import document, few_simulations
from tests.simulated_scenarios import a_pool, a_scenario, a_trainer, all_alike

PULL_S, TRAIN_S_PER_TOKEN, FIXED_S, CONTROL_S = 1.0, 0.001, 2.0, 3.0
GROUPS, GENERATIONS, TOKENS = 20, 4, 500
UNPROBED = NoProbe(reason="not asked")
SHARED = {"placement": "shared", "fleet": "s3://bucket/fleet"}


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
        one_group_after_another(PhaseScenario(start_share=share, start_s=start_s), load_s=load_s, control_s=CONTROL_S),
        seed=1,
    ).iterations[0]
    rollout_s = found.rollout_s
    ends_s = PULL_S + (rollout_s - PULL_S) / GROUPS * np.arange(1, GROUPS + 1)
    train_s = GROUPS * GENERATIONS * TOKENS * TRAIN_S_PER_TOKEN
    due_s = ends_s[math.ceil(share * GROUPS) - 1]
    at_s = due_s + start_s + load_s
    for end_s in ends_s:
        at_s = max(at_s, end_s) + train_s / GROUPS
    assert found.duration_s == pytest.approx(at_s + FIXED_S + CONTROL_S)
    # What concludes and plans holds no machine of the trainer.
    parts = found.seconds[TRAIN_POOL]
    assert sum(parts.values()) == pytest.approx(at_s - due_s + FIXED_S)
    assert parts["process"] == pytest.approx(start_s + load_s)
    assert parts["train"] == pytest.approx(train_s + FIXED_S)
    assert parts["standing"] == 0.0
    assert sum(found.usd[TRAIN_POOL].values()) == pytest.approx(sum(parts.values()) / 3600 * 36.0)


def test_machines_of_its_own_are_held_all_the_time():
    found = simulate(one_group_after_another(None), seed=1).iterations[0]
    assert sum(found.seconds[TRAIN_POOL].values()) == pytest.approx(found.duration_s)


def test_a_host_publishes_from_memory_when_it_has_the_machines_no_more():
    phase = PhaseScenario(start_share=1.0, publishes_beside=True)
    found = simulate(one_group_after_another(phase, load_s=5.0), seed=1).iterations[0]
    assert found.seconds[TRAIN_POOL]["train"] == pytest.approx(found.train_s)
    assert sum(found.seconds[TRAIN_POOL].values()) == pytest.approx(5.0 + found.train_s)
    assert found.duration_s == pytest.approx(found.rollout_s + 5.0 + found.train_s + FIXED_S)


def test_a_phase_is_no_time_to_generate_in():
    written = a_trainer(engines=1)
    with pytest.raises(ValueError, match="engines: value 1; allowed with phase: 0"):
        replace(written, phase=PhaseScenario(start_share=0.9))
    with pytest.raises(ScenarioError, match="start_share"):
        parse_scenario({"trainer": {"phase": {"start_share": 0.0}}})


def made(**trainer: Any) -> ForecastRecord:
    """Of a crew of two spot machines, whose trainer computes for a small part of an iteration."""
    figures = {"widths": [2], "train_s_per_token": 5e-4}
    whole = document(planning={"seeding": "off"}, forecast=figures, trainer=trainer)
    with few_simulations(6):
        record = forecast(parse(whole), UNPROBED, created_at_s=1.0)
    assert refusal(parse(whole), record.snippet) is None
    return record


def configured(record: ForecastRecord) -> tuple[float, float]:
    """Median hours and dollars of the setup as configured."""
    setup: SetupForecast = record.setup("as configured")
    assert setup.hours is not None
    assert setup.usd is not None
    return setup.hours.median, setup.usd.median


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({}, None),
        ({"placement": "pod"}, "the machines cost nothing between phases; it starts in 60 s"),
        (SHARED, "waits for other runs' phases and the host's idle time are not included"),
    ],
)
def test_a_trainer_that_is_held_for_a_part_of_an_iteration_is_shown_with_what_is_not_included(trainer, said):
    inputs = gather(parse(document(trainer=trainer, planning={"seeding": "off"})), UNPROBED)
    found = [each.value for each in inputs.shown if each.name in ("train: pod", "train: shared")]
    assert found == ([] if said is None else [f"phase due when 90% of the groups are recorded; {said}"])
    assert (inputs.trainer.phase is None) == (said is None)


def test_a_state_of_a_shared_trainer_is_switched_and_not_loaded():
    trainer = gather(parse(document(trainer=SHARED, planning={"seeding": "off"})), UNPROBED).trainer
    # Parameters and two moments of 1.2 billion, out and in at 2.5 GB/s.
    assert trainer.load_s == pytest.approx(2 * 12 * 1.2e9 / 2.5e9)


def test_machines_for_phases_only_are_paid_for_the_phases_and_make_the_run_longer():
    own_h, own_usd = configured(made())
    # An L4 at the price table's 0.8048 is paid for all hours.
    assert own_usd > own_h * 0.8048
    for trainer in ({"placement": "pod"}, SHARED):
        hours, usd = configured(made(**trainer))
        assert own_h < hours
        assert usd < own_usd


@pytest.mark.parametrize(("gbps", "is_told"), [(0.5, True), (4000.0, False)])
def test_a_trainer_is_advised_to_stand_where_its_state_takes_a_large_part_of_an_iteration(gbps, is_told, monkeypatch):
    monkeypatch.setattr(trainer_inputs, "LINK_GBPS", gbps)
    # The fastest setup has a crew; without one the trainer's machines generate.
    config = parse(document(planning={"seeding": "off", "cost_weight": 0.0}))
    reason = forecast(config, UNPROBED, created_at_s=1.0).reason
    assert ("trainer.placement 'standing' keeps it in memory" in reason) == is_told


def test_a_standing_trainer_restores_nothing_and_writes_beside_the_rollout():
    own, standing = (
        gather(parse(document(trainer={"placement": placement}, planning={"seeding": "off"})), UNPROBED).trainer
        for placement in ("own", "standing")
    )
    assert own.load_s > standing.load_s == 0.0
    assert own.train_fixed_s > standing.train_fixed_s
    assert standing.phase is None
