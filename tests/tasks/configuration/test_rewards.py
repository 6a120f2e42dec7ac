import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tasks.configuration.data import DataConfig
from tasks.configuration.evaluation import EvaluationConfig
from tasks.configuration.rewards import RewardConfig, reward_names
from tasks.configuration.turns import TurnsConfig, rewards_without_environment


def read(values: dict[str, Any]) -> RewardConfig:
    return TypeAdapter(RewardConfig).validate_json(json.dumps(values))


@pytest.mark.parametrize("function", ["arithmetic", "math", "rewards:length", "my.pkg.rewards:Judge.score"])
def test_functions_are_built_in_or_named_by_module(function: str):
    assert read({"function": function}) == RewardConfig(function=function)


@pytest.mark.parametrize("function", ["", "maths", "rewards:f:g", "rewards", "rewards:", ":f", "a b:f", "rewards:f()"])
def test_other_functions_are_refused(function: str):
    with pytest.raises(ValidationError, match=r"function: value .*allowed: 'arithmetic', .*, or 'package.module:"):
        read({"function": function})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_limit_s", 0),
        ("weight", "1"),
        ("on_failure", None),
        ("on_failure", "ignore"),
        ("on_failure", True),
        ("timeout", 3),
    ],
)
def test_bad_values_are_refused_by_the_name_of_their_field(field: str, value: Any):
    with pytest.raises(ValidationError) as caught:
        read({"function": "math", field: value})
    assert caught.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize(
    "values",
    [
        {"function": "format", "arguments": {"pattern": r"<answer>.*</answer>"}},
        {"function": "rewards:make", "arguments": {"limit": 3, "names": ["a"], "nested": {"b": None}}},
        {"function": "length", "arguments": {"free_tokens": 0, "scale_tokens": 1}},
        {"function": "reward_model", "model": "models/judge", "name": "judge_2", "label": 1},
    ],
)
def test_built_in_functions_have_settings_of_their_own(values: dict[str, Any]):
    assert read(values) == RewardConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"function": "math", "arguments": {}},
            "arguments: given; allowed: nothing, unless the function is 'format', 'length' or",
        ),
        ({"function": "format"}, "arguments.pattern: missing; the function 'format' cannot do without it"),
        (
            {"function": "format", "arguments": {"pattern": "(a"}},
            "arguments.pattern: value '(a'; allowed: a regular expression: missing ), unt",
        ),
        (
            {"function": "length", "arguments": {"free_tokens": 9}},
            "arguments.scale_tokens: missing; the function 'length'",
        ),
        (
            {"function": "length", "arguments": {"free_tokens": -1, "scale_tokens": 1}},
            "arguments.free_tokens: value -1; al",
        ),
        (
            {"function": "length", "arguments": {"free_tokens": 1, "scale_tokens": 0}},
            "arguments.scale_tokens: value 0; al",
        ),
        (
            {"function": "format", "arguments": {"pattern": 3}},
            "arguments.pattern: value 3; allowed: a regular expression",
        ),
        ({"function": "format", "arguments": {"pattern": "a", "flags": 1}}, "arguments.flags: unknown; allowed with"),
        ({"function": "reward_model"}, "model: missing; the function 'reward_model' cannot do without it"),
        (
            {"function": "a:f", "dtype": "bfloat16"},
            "dtype: value 'bfloat16'; allowed: nothing, unless the function is 'reward_model'",
        ),
        ({"function": "math", "name": "a/b"}, "name: value 'a/b'; allowed: null, or up to 64 letters, digits and _"),
        ({"function": "math", "name": ""}, "name: value ''; allowed: null, or up to 64 letters, digits and _"),
    ],
)
def test_settings_that_are_missing_bad_or_of_another_function_are_refused(values: dict[str, Any], message: str):
    with pytest.raises(ValidationError) as caught:
        read(values)
    assert caught.value.errors()[0]["msg"].startswith(f"Value error, {message}")


@pytest.mark.parametrize(
    ("field", "value"),
    [("label", -1), ("dtype", "int8")],
)
def test_numbers_and_choices_have_bounds(field: str, value: Any):
    with pytest.raises(ValidationError) as caught:
        read({"function": "math", field: value})
    assert caught.value.errors()[0]["loc"] == (field,)


def named(*functions: tuple[str, str | None]) -> list[str]:
    return reward_names([RewardConfig(function=function, name=name) for function, name in functions])


def test_a_function_is_called_by_its_name_else_as_shortly_as_is_clear():
    assert named(("math", None), ("a:f", None), ("b:g", "style")) == ["math", "f", "style"]
    assert named(("a:f", None), ("b:f", None)) == ["a:f", "b:f"]
    assert named(("a:math", None), ("math", "strict")) == ["math", "strict"]
    assert named(("a:f", None), ("b:g", "f")) == ["a:f", "f"]
    assert named(("a:f", "one"), ("a:f", "two"), ("a:f", None)) == ["one", "two", "f"]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ((("a:f", None), ("a:f", None)), "'a:f' is configured twice; allowed: once, with the sum of the weights, or"),
        ((("a:f", "g"), ("a:h", "g")), "2 functions are called 'g'; allowed: each a name of its own"),
        ((("math", None), ("a:h", "math")), "2 functions are called 'math'; allowed: each a name of its own"),
    ],
)
def test_no_two_functions_are_called_the_same(functions: tuple[tuple[str, str | None], ...], message: str):
    with pytest.raises(ValueError, match=message):
        named(*functions)


def test_the_environments_own_reward_needs_an_environment():
    own = (RewardConfig(function="environment"),)
    tools = TurnsConfig(tools=("package.module:look",))
    acting = TurnsConfig(environment="package.module:Game")
    evaluation = EvaluationConfig(data=DataConfig(), rewards=own)
    expected = "function: value 'environment'; allowed only with turns.environment or turns.agent"
    for turns in (None, tools):
        found = list(rewards_without_environment(turns, own, evaluation))
        assert found == [f"rewards.0.{expected}", f"evaluation.rewards.0.{expected}"]
    assert list(rewards_without_environment(acting, own, evaluation)) == []


@pytest.mark.parametrize(("given", "value"), [("-1e0", -1.0), ("5e-1", 0.5)])
def test_a_failure_may_count_as_a_number_that_yaml_reads_as_text(given, value):
    document = json.dumps({"function": "arithmetic", "on_failure": given})
    assert TypeAdapter(RewardConfig).validate_json(document).on_failure == value
