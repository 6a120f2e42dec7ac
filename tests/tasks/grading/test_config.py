import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tasks.grading.config import RewardConfig


def read(values: dict[str, Any]) -> RewardConfig:
    return TypeAdapter(RewardConfig).validate_json(json.dumps(values))


@pytest.mark.parametrize("function", ["arithmetic", "math", "rewards:length", "my.pkg.rewards:Judge.score"])
def test_functions_are_built_in_or_named_by_module(function: str):
    assert read({"function": function}) == RewardConfig(function=function)


@pytest.mark.parametrize("function", ["", "maths", "rewards:f:g", "rewards", "rewards:", ":f", "a b:f", "rewards:f()"])
def test_other_functions_are_refused(function: str):
    with pytest.raises(ValidationError, match=r"function: value .*allowed: 'arithmetic', 'math', or 'package.module:"):
        read({"function": function})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_limit_s", 0),
        ("load_time_limit_s", -1),
        ("weight", "1"),
        ("failure_reward", None),
        ("on_failure", "ignore"),
        ("timeout", 3),
    ],
)
def test_bad_values_are_refused_by_the_name_of_their_field(field: str, value: Any):
    with pytest.raises(ValidationError) as caught:
        read({"function": "math", field: value})
    assert caught.value.errors()[0]["loc"] == (field,)
