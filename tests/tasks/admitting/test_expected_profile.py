"""The profile of a run that has no iteration yet: from a forecast of its configuration, until there are reports."""

from dataclasses import replace
from pathlib import Path

import pytest

from storage.clock import ManualClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import AdmittedRun, FleetRecord
from storage.records import layout, records
from storage.records.records import ReportRecord, RunRecord
from storage.stores.connect import connect
from tasks.admitting.fleet_admission import Profile, admit
from tasks.configuration.run_config import RunConfig, parse
from tasks.forecasting.expected_profile import expected_profile
from tasks.sharing.shared_cycles import Conditions, share_trainer
from tests.fleet_records import TTL_S, a_run
from tests.forecast_documents import document
from tests.small_run import memory_store

pytestmark = pytest.mark.usefixtures("few_simulations")
FLEET, URL = "memory://expecting", "memory://expected/run"
NO_MODEL = Path("/nowhere/model")


@pytest.fixture
def store():
    made = memory_store("expecting")
    memory_store("expected")
    rules = FleetRecord(run_prefixes=("memory://expected",), host_ttl_s=TTL_S, created_at_s=0.0)
    records.put(made, fleet_layout.FLEET, rules)
    return made


def settings(**forecast) -> RunConfig:
    """A run that can be forecast, and whose model is not on this machine."""
    figures = {**document()["forecast"], **forecast}
    shared = {"placement": "shared", "fleet": FLEET}
    return parse(document(URL, planning={"seeding": "off"}, trainer=shared, forecast=figures))


def admitted(config: RunConfig, profile: Profile = Profile()) -> AdmittedRun:  # noqa: B008 - it is frozen
    return admit(config, NO_MODEL, profile, ManualClock(0.0), dry_run=True).run


@pytest.mark.usefixtures("store")
def test_a_newcomer_is_expected_to_be_as_a_forecast_of_it_says():
    run, expected = admitted(settings()), expected_profile(settings())
    assert (run.phase_s, run.cycle_s) == (expected.phase_s, expected.cycle_s)
    assert (run.rollout_cv, run.phase_cv) == (expected.rollout_cv, expected.phase_cv)
    # Parameters and two moments of 1.2 billion in float32.
    assert run.state_bytes == 12 * 1.2e9
    assert 0 < run.phase_s < run.cycle_s
    assert run.phase_cv is not None
    assert 0 < run.phase_cv < 1
    slower = admitted(settings(train_s_per_token=0.05))
    assert slower.phase_s > 2 * run.phase_s


@pytest.mark.usefixtures("store")
def test_what_the_operator_says_is_not_forecast():
    run = admitted(settings(), Profile(phase_s=7.0))
    assert (run.phase_s, run.cycle_s) == (7.0, expected_profile(settings()).cycle_s)
    said = admitted(settings(), Profile(phase_s=7.0, cycle_s=70.0))
    assert (said.phase_s, said.cycle_s, said.rollout_cv, said.phase_cv) == (7.0, 70.0, None, None)


@pytest.mark.usefixtures("store")
def test_reports_win_once_there_are_some():
    run = connect(URL)
    whole = RunRecord(config={}, digest="0" * 64, vocab_size=9, model_files={}, created_at_s=0.0)
    records.put(run, layout.RUN, whole)
    assert admitted(settings()).phase_s == expected_profile(settings()).phase_s
    report = ReportRecord(
        iteration=0,
        weight_version=1,
        next_prompt=0,
        metrics={"timing_s/iteration": 390.0, "timing_s/compute": 20.0},
        rewards=(),
        lengths=(),
        lives=(),
        train_started_at_s=0.0,
        train_ended_at_s=0.0,
        created_at_s=400.0,
    )
    records.put(run, layout.report(0), report)
    measured = admitted(settings())
    assert (measured.phase_s, measured.cycle_s) == (20.0, 390.0)
    assert (measured.rollout_cv, measured.phase_cv) == (None, None)


@pytest.mark.usefixtures("store")
def test_what_cannot_be_forecast_says_what_is_missing():
    with pytest.raises(ValueError, match=r"--phase-s: value missing; .* no iteration yet, and cannot be forecast: "):
        admitted(settings(parameters_billions=None))


def test_a_run_that_tells_how_its_times_vary_is_simulated_so():
    steady, given = a_run("a", rollout_cv=0.0, phase_cv=0.0), Conditions(switch_s=1.0, rollout_cv=0.5, phase_cv=0.5)
    [found] = share_trainer([steady], given, iterations=20, seed=0).runs
    assert found.alone_s == pytest.approx(20 * steady.cycle_s)
    [varied] = share_trainer([a_run("a")], given, iterations=20, seed=0).runs
    assert varied.alone_s != pytest.approx(20 * steady.cycle_s)
    with pytest.raises(ValueError, match=r"phase_cv: value -0.1; allowed: 0 or more"):
        replace(steady, phase_cv=-0.1)
