"""The scheduled launch plan, and configurations as the ways of starting a run hand them over."""

import importlib
import json
from collections import OrderedDict
from pathlib import Path

import pytest
from croniter import croniter
from flytekit import LaunchPlan
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal, Scalar
from flytekit.tools.translator import get_serializable
from google.protobuf import json_format, struct_pb2

from tasks.configuration.run_config import ConfigError, dump, load, parse
from workflows import launch_plans

SETTINGS = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def reload(monkeypatch):
    """reload(VARIABLE=value, ...) -> the launch plan as a registration in that environment makes it."""

    def again(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        LaunchPlan.CACHE.pop("continue_run", None)
        return importlib.reload(launch_plans).continue_run

    yield again
    monkeypatch.undo()
    again()


def serialised(plan):
    return get_serializable(OrderedDict(), SETTINGS, plan).to_flyte_idl()


def schedule_of(plan):
    return serialised(plan).spec.entity_metadata.schedule.cron_schedule.schedule


def test_a_tick_is_skipped_while_an_execution_runs():
    policy = serialised(launch_plans.continue_run).spec.concurrency_policy
    assert policy.max == 1
    assert (
        policy.DESCRIPTOR.fields_by_name["behavior"].enum_type.values_by_number[policy.behavior].name.endswith("SKIP")
    )


def test_the_schedule_is_a_cron_expression_of_five_fields():
    schedule = schedule_of(launch_plans.continue_run)
    assert len(schedule.split()) == 5
    assert croniter.is_valid(schedule)


def test_it_continues_the_training_workflow_with_everything_said():
    plan = serialised(launch_plans.continue_run)
    assert plan.spec.workflow_id.name == "workflows.training.training"
    fixed = plan.spec.fixed_inputs.literals
    assert set(fixed) == {"config", "count"}
    assert fixed["count"].scalar.primitive.integer == launch_plans.ITERATIONS_PER_TICK
    assert not plan.spec.default_inputs.parameters


def test_the_configuration_travels_within_the_plan_and_comes_out_as_it_went_in():
    """No file of the machine that registers is pointed at."""
    literal = serialised(launch_plans.continue_run).spec.fixed_inputs.literals["config"]
    assert "uri" not in json_format.MessageToJson(literal)
    context = FlyteContextManager.current_context()
    document = TypeEngine.to_python_value(context, Literal.from_flyte_idl(literal), dict)
    assert parse(document) == load(launch_plans.EXAMPLE)


def test_configuration_and_schedule_are_those_of_the_environment(reload):
    plan = reload(GLEANER_RUN_CONFIG=str(EXAMPLES / "demo.yaml"), GLEANER_SCHEDULE="*/20 6 * * 1")
    assert schedule_of(plan) == "*/20 6 * * 1"
    literal = Literal.from_flyte_idl(serialised(plan).spec.fixed_inputs.literals["config"])
    document = TypeEngine.to_python_value(FlyteContextManager.current_context(), literal, dict)
    assert parse(document) == load(EXAMPLES / "demo.yaml")


def test_a_bad_configuration_is_not_registered(reload, tmp_path):
    (tmp_path / "bad.yaml").write_text("run: {url: x, sede: 1}")
    with pytest.raises(ConfigError, match=r"run\.sede: unknown field; did you mean 'seed'"):
        reload(GLEANER_RUN_CONFIG=str(tmp_path / "bad.yaml"))


def test_a_bad_schedule_is_not_registered(reload):
    with pytest.raises(ValueError, match="99"):
        reload(GLEANER_SCHEDULE="99 * * * *")


def test_a_schedule_of_six_fields_is_not_registered(reload):
    with pytest.raises(ValueError, match="five fields"):
        reload(GLEANER_SCHEDULE="0 0 * * * *")


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
