"""PlexRL's published savings beside the simulator of shared trainers."""

import json
from dataclasses import replace

import pytest

from benchmarks.seeds import __main__ as seeds
from benchmarks.seeds import plexrl
from benchmarks.seeds.plexrl import MODELS, PUBLISHED, SWEPT, measure
from tasks.sharing.shared_cycles import saving


@pytest.mark.parametrize(("model", "bound"), [("7B", 1 / 3), ("30B", 1 / 3), ("235B", 0.4)])
def test_the_chosen_split_allows_what_was_published(model, bound):
    assert MODELS[model].bound == pytest.approx(bound)
    assert MODELS[model].bound > PUBLISHED[model][0]


@pytest.mark.parametrize("model", MODELS)
def test_savings_are_near_the_published_ones_and_never_beyond_the_bound(model):
    setting = MODELS[model]
    synchronous, ahead = measure(setting, (1, 2)), measure(replace(setting, ahead=1), (1, 2))
    assert synchronous.part == pytest.approx(PUBLISHED[model][0], abs=0.015)
    assert synchronous.part < ahead.part <= setting.bound
    assert setting.bound - ahead.part < 0.01


def test_a_longer_switch_saves_less_and_may_cost_more_than_it_saves():
    parts = [measure(SWEPT.with_switch(switch_s), (1,)).part for switch_s in (0.0, 20.0, 135.0)]
    assert parts == sorted(parts, reverse=True)
    assert measure(replace(SWEPT, runs=6).with_switch(135.0), (1,)).part < 0


def test_one_run_saves_nothing():
    assert measure(replace(SWEPT, runs=1), (1,)).part == pytest.approx(0.0, abs=1e-9)


def test_the_bound_is_a_claim_that_a_saving_without_its_slowdown_would_break(monkeypatch):
    monkeypatch.setattr(plexrl, "DRAWN", 5)
    assert plexrl.above_bound().target().met
    monkeypatch.setattr(plexrl, "saving", lambda slowdown, *how: saving(2 - slowdown, *how))
    assert not plexrl.above_bound().target().met


def test_that_two_runs_one_step_off_come_near_the_bound_is_a_claim_that_a_slower_trainer_would_break(monkeypatch):
    monkeypatch.setattr(plexrl, "SWITCHES_S", (20.0,))
    assert plexrl.below_bound((1,)).target().met
    monkeypatch.setattr(plexrl, "KEEPS_UP", 2.0)
    assert not plexrl.below_bound((1,)).target().met


def test_the_command_shows_it_with_its_knobs_and_claims_no_prediction(capsys):
    seeds.main(["--json", "--paper", "PlexRL", "--seeds", "1", "--workers", "0"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["conditions"]["knobs"] == {"PlexRL": plexrl.KNOBS}
    published = [row for row in summary["rows"] if row["published"]]
    assert [row["verdict"] for row in published] == ["fitted, inside"] * 3
    claims = {name: target["met"] for name, target in summary["targets"].items()}
    assert list(claims.values()) == [True, True]
    assert all("bound" in name for name in claims)
    whats = [row["what"] for row in summary["rows"]]
    assert len(whats) == len(set(whats))
