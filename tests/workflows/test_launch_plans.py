"""The scheduled launch plans, and configurations as the ways of starting a run hand them over."""

import importlib
import json
import runpy
from collections import OrderedDict
from pathlib import Path

import pytest
import yaml
from click import BadParameter
from croniter import croniter
from flyteidl.core.execution_pb2 import WorkflowExecution
from flytekit import LaunchPlan
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal, Scalar
from flytekit.tools.translator import get_serializable
from google.protobuf import json_format, struct_pb2

from tasks.configuration.run_config import ConfigError, dump, load, parse, settings_digest
from tests.test_docs import blocks
from workflows import launch_plans, uploads

SETTINGS = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EXAMPLE = EXAMPLES / "gsm8k_qwen3.yaml"


@pytest.fixture
def reload(monkeypatch):
    """reload(VARIABLE=value, ...) -> the launch plans by name as a registration in that environment makes them."""

    def again(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for name in launch_plans.PLANS:
            LaunchPlan.CACHE.pop(name, None)
        return importlib.reload(launch_plans).PLANS

    yield again
    monkeypatch.undo()
    again()


@pytest.fixture
def planned():
    """planned(...) -> what `scheduled` makes; its name is free again afterwards."""
    before = dict(LaunchPlan.CACHE)
    yield launch_plans.scheduled
    for name in LaunchPlan.CACHE.keys() - before.keys():
        del LaunchPlan.CACHE[name]


def serialised(plan):
    return get_serializable(OrderedDict(), SETTINGS, plan).to_flyte_idl()


def given(plan, name):
    """The literal of an input in the executions that a plan's schedule starts."""
    return serialised(plan).spec.default_inputs.parameters[name].default


def schedule_of(plan):
    return serialised(plan).spec.entity_metadata.schedule.cron_schedule.schedule


def test_a_tick_is_skipped_while_an_execution_runs(planned):
    policy = serialised(planned(EXAMPLE)).spec.concurrency_policy
    assert policy.max == 1
    assert (
        policy.DESCRIPTOR.fields_by_name["behavior"].enum_type.values_by_number[policy.behavior].name.endswith("SKIP")
    )


def test_the_schedule_is_a_cron_expression_of_five_fields(planned):
    schedule = schedule_of(planned(EXAMPLE))
    assert len(schedule.split()) == 5
    assert croniter.is_valid(schedule)


def test_it_continues_the_training_workflow_with_everything_said_and_nothing_fixed(planned):
    plan = planned(EXAMPLE, iterations=7, name="math")
    spec = serialised(plan).spec
    assert (plan.name, spec.workflow_id.name) == ("math", "workflows.training.training")
    assert set(spec.default_inputs.parameters) == {"config", "count"}
    assert given(plan, "count").scalar.primitive.integer == 7
    assert not spec.fixed_inputs.literals


def test_fields_are_changed_beside_the_file_and_modules_go_along(planned, monkeypatch):
    monkeypatch.setattr(uploads, "_own_modules", set())
    reward = "rewards.0={function: 'tests.reward_functions:beginning_with', arguments: {n: 3}}"
    plan = planned(EXAMPLES / "demo.yaml", "@daily", overrides=["run.seed=9", reward])
    assert schedule_of(plan) == "@daily"
    assert document_of(plan)["run"]["seed"] == 9
    assert ROOT / "tests" / "reward_functions.py" in uploads._own_files(ROOT)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"schedule": "0 0 * * * *"}, "schedule: '0 0 * * * *' given; allowed: a cron expression of five fields"),
        ({"iterations": 0}, "count: value 0; allowed: 1 or more"),
        ({"name": "a.b"}, "name: value 'a.b'; allowed: letters, digits"),
        ({"overrides": ["run.sede=1"]}, "run.sede: unknown field; did you mean 'seed'?"),
    ],
)
def test_what_cannot_be_scheduled_is_said_in_a_line(planned, arguments, said):
    with pytest.raises((ValueError, BadParameter)) as caught:
        planned(EXAMPLE, **arguments)
    assert said in str(caught.value)


def test_the_guides_file_makes_its_plans(planned, tmp_path, monkeypatch):
    [text] = blocks(ROOT / "docs/guide/on_a_cluster.md", "python", "launch plans")
    monkeypatch.chdir(tmp_path)
    for name, example in (("my_run", EXAMPLE), ("my_other_run", EXAMPLES / "demo.yaml")):
        (tmp_path / f"{name}.yaml").write_text(example.read_text())
    (tmp_path / "my_plans.py").write_text(text)
    made = runpy.run_path(str(tmp_path / "my_plans.py"))
    assert [schedule_of(made[name]) for name in ("math", "code")] == ["0 */2 * * *", "0 * * * *"]
    assert [len(serialised(made[name]).spec.entity_metadata.notifications) for name in ("math", "code")] == [2, 0]
    assert document_of(made["code"])["run"]["seed"] == 9


def test_two_plans_of_one_name_are_refused(planned):
    planned(EXAMPLE)
    with pytest.raises(ValueError, match=r"^name: value 'continue_run' given to two launch plans; allowed: one name"):
        planned(EXAMPLES / "demo.yaml")


def test_an_environment_that_names_no_run_makes_no_plan():
    assert launch_plans.PLANS == {}


def document_of(plan):
    literal = Literal.from_flyte_idl(given(plan, "config"))
    return TypeEngine.to_python_value(FlyteContextManager.current_context(), literal, dict)


def test_the_configuration_travels_within_the_plan_and_comes_out_as_it_went_in(planned):
    """No file of the machine that registers is pointed at."""
    plan = planned(EXAMPLE)
    assert "uri" not in json_format.MessageToJson(given(plan, "config"))
    assert parse(document_of(plan)) == load(EXAMPLE)


def test_a_registered_plan_knows_the_digest_of_its_settings(reload, tmp_path):
    def annotated(document):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        plan = reload(GLEANER_RUN_CONFIG=str(tmp_path / "run.yaml"))["continue_run"]
        return serialised(plan).spec.annotations.values["gleaner-settings"]

    document = yaml.safe_load((EXAMPLES / "demo.yaml").read_text(encoding="utf-8"))
    first = annotated(document)
    assert first == settings_digest(load(tmp_path / "run.yaml"))
    assert annotated(document | {"pools": {"rollout": {"count": 5}}}) != first


def test_configuration_and_schedule_are_those_of_the_environment(reload):
    plan = reload(GLEANER_RUN_CONFIG=str(EXAMPLES / "demo.yaml"), GLEANER_SCHEDULE="*/20 6 * * 1")["continue_run"]
    assert schedule_of(plan) == "*/20 6 * * 1"
    assert parse(document_of(plan)) == load(EXAMPLES / "demo.yaml")


def test_a_bad_configuration_is_not_registered(reload, tmp_path):
    (tmp_path / "bad.yaml").write_text("run: {url: x, sede: 1}")
    with pytest.raises(ConfigError, match=r"run\.sede: unknown field; did you mean 'seed'"):
        reload(GLEANER_RUN_CONFIG=str(tmp_path / "bad.yaml"))


def test_a_bad_schedule_is_not_registered(reload):
    with pytest.raises(ValueError, match="99"):
        reload(GLEANER_RUN_CONFIG=str(EXAMPLE), GLEANER_SCHEDULE="99 * * * *")


def test_a_schedule_of_six_fields_is_not_registered(reload):
    with pytest.raises(ValueError, match="five fields"):
        reload(GLEANER_RUN_CONFIG=str(EXAMPLE), GLEANER_SCHEDULE="0 0 * * * *")


@pytest.mark.parametrize("schedule", ["CRON_TZ=Europe/Berlin 0 2 * * *", "TZ=Europe/Berlin 0 2 * * *"])
def test_a_schedule_of_another_time_zone_than_utc_is_not_registered_and_the_guide_says_so(reload, schedule):
    with pytest.raises(ValueError, match="five fields"):
        reload(GLEANER_RUN_CONFIG=str(EXAMPLE), GLEANER_SCHEDULE=schedule)
    guide = " ".join((ROOT / "docs/guide/on_a_cluster.md").read_text(encoding="utf-8").split())
    assert "a cron expression of five fields, or `@daily` and the like, in UTC;" in guide


def schedules(folder, text):
    """A file of scheduled runs beside two configurations."""
    for name in ("gsm8k_qwen3", "demo"):
        (folder / f"{name}.yaml").write_text((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "schedules.yaml").write_text(text, encoding="utf-8")
    return str(folder / "schedules.yaml")


def test_several_runs_have_a_plan_each_and_no_other_is_made(reload, tmp_path):
    [fragment] = blocks(ROOT / "docs/guide/on_a_cluster.md", "yaml", "schedules")
    plans = reload(
        GLEANER_SCHEDULES=schedules(tmp_path, fragment.replace("my_run", "gsm8k_qwen3").replace("my_other_run", "demo"))
    )
    assert {name: schedule_of(plan) for name, plan in plans.items()} == {"math": "0 */2 * * *", "code": "0 * * * *"}
    assert [given(plans[name], "count").scalar.primitive.integer for name in ("math", "code")] == [8, 4]
    assert parse(document_of(plans["code"])) == load(EXAMPLES / "demo.yaml")
    for plan in plans.values():
        assert plan.concurrency.max_concurrency == 1
        assert serialised(plan).spec.workflow_id.name == "workflows.training.training"


def test_the_addresses_are_told_of_the_phases_that_are_named(reload, tmp_path):
    [fragment] = blocks(ROOT / "docs/guide/on_a_cluster.md", "yaml", "schedules")
    plans = reload(
        GLEANER_SCHEDULES=schedules(tmp_path, fragment.replace("my_run", "gsm8k_qwen3").replace("my_other_run", "demo"))
    )
    spec = serialised(plans["math"]).spec.entity_metadata
    told = [
        (
            each.WhichOneof("type"),
            list(getattr(each, each.WhichOneof("type")).recipients_email),
            [WorkflowExecution.Phase.Name(phase) for phase in each.phases],
        )
        for each in spec.notifications
    ]
    ends_badly = ["FAILED", "TIMED_OUT", "ABORTED"]
    assert told == [
        ("email", ["team@example.org"], ends_badly),
        ("pager_duty", ["oncall@example.pagerduty.com"], ends_badly),
        ("slack", ["wins@example.slack.com"], ["SUCCEEDED"]),
    ]
    assert not serialised(plans["code"]).spec.entity_metadata.notifications


@pytest.mark.parametrize("variable", ["GLEANER_RUN_CONFIG", "GLEANER_SCHEDULE"])
def test_one_run_and_several_are_not_registered_together(reload, tmp_path, variable):
    with pytest.raises(ValueError, match=f"^{variable}: allowed: unset, because GLEANER_SCHEDULES names a file"):
        reload(GLEANER_SCHEDULES=schedules(tmp_path, "a: {config: demo.yaml}"), **{variable: "x"})


def test_a_bad_schedule_in_the_file_names_its_run(reload, tmp_path):
    with pytest.raises(ValueError, match=r"schedules.yaml: a.schedule: '0 0 \* \* \* \*' given; allowed: a cron"):
        reload(GLEANER_SCHEDULES=schedules(tmp_path, "a: {config: demo.yaml, schedule: 0 0 * * * *}"))


def as_flytekit_hands_it_over(document):
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(context, document, dict, TypeEngine.to_literal_type(dict))
    return TypeEngine.to_python_value(context, literal, dict)


def as_the_console_hands_it_over(document):
    """The console and flytectl send a protobuf Struct, which knows one kind of number."""
    struct = struct_pb2.Struct()
    struct.update(json.loads(json.dumps(document)))
    literal = Literal(scalar=Scalar(generic=struct))
    return TypeEngine.to_python_value(FlyteContextManager.current_context(), literal, dict)


@pytest.mark.parametrize(
    "hand_over",
    [
        as_flytekit_hands_it_over,
        as_the_console_hands_it_over,
    ],
)
@pytest.mark.parametrize("example", ["demo.yaml", "gsm8k_qwen3.yaml"])
def test_a_configuration_survives_its_way_to_the_tasks(example, hand_over):
    config = load(EXAMPLES / example)
    assert parse(hand_over(dump(config))) == config
