"""`gleaner doctor --cluster` compares the launch plans that are on, as flytekit registers them, with the files."""

from collections import OrderedDict

import pytest
import yaml
from flytekit import LaunchPlan
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable

from tasks.configuration.run_config import load, settings_digest
from tests.tasks.doctor.test_cluster import place, wrong
from tests.workflows.test_launch_plans import reload
from workflows import launch_plans

__all__ = ["place", "reload"]
pytestmark = pytest.mark.slow
NAME = "launch plan continue_run"


def registered(plan, version):
    settings = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "gleaner", "development", version)
    return get_serializable(OrderedDict(), settings, plan).to_flyte_idl()


@pytest.fixture
def on(place, reload):
    """The plan of the run's configuration, registered as version 8, and its schedule on."""
    [plan] = reload(GLEANER_RUN_CONFIG=str(place.run), GLEANER_SCHEDULE="0 2 * * *").values()
    place.admin.plans = [registered(plan, "8")]
    return place


def change(place, **sections):
    document = yaml.safe_load(place.run.read_text())
    place.run.write_text(yaml.safe_dump(document | sections))


def test_a_plan_that_is_what_the_file_says(on):
    code, found = on.doctor()
    assert (code, wrong(found)) == (0, {})
    digest = settings_digest(load(on.run))
    assert found[NAME] == (f"version 8, at 0 2 * * * (UTC): 4 iterations of {on.folder / 'store'}, settings {digest}")


@pytest.mark.parametrize("names_plans", [True, False])
def test_a_configuration_that_was_changed_since_is_told_with_what_differs(on, names_plans, monkeypatch):
    """Also without the variables, for the plan of the configuration's run."""
    if not names_plans:
        monkeypatch.delenv("GLEANER_RUN_CONFIG")
        monkeypatch.delenv("GLEANER_SCHEDULE")
    change(on, pools={"rollout": {"count": 7}})
    code, found = on.doctor()
    assert (code, list(wrong(found))) == (1, [NAME])
    assert "version 8 has other settings: pools.rollout.count: 7 here, 2 there" in found[NAME]
    assert found[NAME].endswith("; register again, under another version")


def test_a_schedule_that_was_changed_since(on, monkeypatch):
    monkeypatch.setenv("GLEANER_SCHEDULE", "0 3 * * *")
    code, found = on.doctor()
    assert (code, list(wrong(found))) == (1, [NAME])
    assert "other ticks: 0 3 * * * here, 0 2 * * * there" in found[NAME]


def test_a_plan_that_was_taken_out_of_the_file_and_one_that_is_not_on(on, monkeypatch):
    schedules = on.folder / "schedules.yaml"
    schedules.write_text(yaml.safe_dump({"math": {"config": on.run.name, "schedule": "0 2 * * *"}}))
    monkeypatch.delenv("GLEANER_RUN_CONFIG")
    monkeypatch.delenv("GLEANER_SCHEDULE")
    monkeypatch.setenv("GLEANER_SCHEDULES", str(schedules))
    code, found = on.doctor()
    assert (code, sorted(wrong(found))) == (1, [NAME, "launch plan math"])
    assert "on, though it is none of math: its ticks go on" in found[NAME]
    assert found[NAME].endswith("pyflyte launchplan -p gleaner -d development --deactivate continue_run 8")
    assert "not on: register it with --activate-launchplans" in found["launch plan math"]


def test_iterations_that_were_changed_in_the_file(on, monkeypatch):
    schedules = on.folder / "schedules.yaml"
    described = {"config": on.run.name, "schedule": "0 2 * * *", "iterations": 9}
    schedules.write_text(yaml.safe_dump({"continue_run": described}))
    monkeypatch.delenv("GLEANER_RUN_CONFIG")
    monkeypatch.delenv("GLEANER_SCHEDULE")
    monkeypatch.setenv("GLEANER_SCHEDULES", str(schedules))
    code, found = on.doctor()
    assert (code, list(wrong(found))) == (1, [NAME])
    assert "other iterations: 9 here, 4 there" in found[NAME]


def test_a_plan_of_a_gleaner_that_had_fewer_fields_is_the_same_where_their_defaults_hold(on):
    """It carries no digest, and its configuration lacks the fields."""
    [plan] = launch_plans.PLANS.values()
    document = yaml.safe_load(on.run.read_text())
    older = LaunchPlan.get_or_create(
        plan.workflow, name="older", schedule=plan.schedule, fixed_inputs={"config": document, "count": 4}
    )
    LaunchPlan.CACHE.pop("older")
    [on.admin.plans[0]] = [registered(older, "7")]
    on.admin.plans[0].id.name = "continue_run"
    code, found = on.doctor()
    assert (code, wrong(found)) == (0, {})
    assert found[NAME].endswith("settings unknown")


@pytest.mark.parametrize("config", [{"run": {"url": "x"}}, {"run": "x"}, {}])
def test_a_plan_whose_settings_are_refused_today_is_told(on, config):
    [plan] = launch_plans.PLANS.values()
    wrong_now = LaunchPlan.get_or_create(
        plan.workflow, name="old", schedule=plan.schedule, fixed_inputs={"config": config, "count": 4}
    )
    LaunchPlan.CACHE.pop("old")
    on.admin.plans = [registered(wrong_now, "1")]
    on.admin.plans[0].id.name = "continue_run"
    code, found = on.doctor()
    assert (code, list(wrong(found))) == (1, [NAME])
    assert "version 1 has settings that this Gleaner refuses" in found[NAME]


def test_plans_that_may_not_be_read_are_not_called_good(on):
    on.admin.denied = {"ListActiveLaunchPlans"}
    code, found = on.doctor()
    assert code == 0
    assert found["launch plans"].startswith("not readable: ")
