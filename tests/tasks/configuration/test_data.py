import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tasks.configuration.data import ArithmeticConfig, DataConfig


def read(values: dict[str, Any]) -> DataConfig:
    return TypeAdapter(DataConfig).validate_json(json.dumps(values))


def test_the_defaults_are_the_generator():
    config = read({})
    assert config == DataConfig()
    assert config.source == "arithmetic"
    assert config.arithmetic == ArithmeticConfig(items_max=16, stop_probability=0.2)


def test_nested_settings_are_read():
    assert read({"arithmetic": {"items_max": 7}}).arithmetic.items_max == 7


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"sauce": "x"}, "sauce"),
        ({"seed": -1}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"limit": 0}, "limit"),
        ({"max_prompt_length": 0}, "max_prompt_length"),
        ({"allow": ["anything"]}, "allow.0"),
        ({"chat_template_kwargs": None}, "chat_template_kwargs"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"arithmetic": {"items_max": 27}}, "arithmetic.items_max"),
        ({"arithmetic": {"stop_probability": 0.0}}, "arithmetic.stop_probability"),
    ],
)
def test_bad_values_are_refused_by_the_name_of_their_field(values: dict[str, Any], field: str):
    with pytest.raises(ValidationError) as caught:
        read(values)
    assert ".".join(str(part) for part in caught.value.errors()[0]["loc"]) == field


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"split": "train"}, "split: value 'train'; allowed"),
        ({"prompt_column": "question"}, "prompt_column: value 'question'; allowed"),
        ({"continue_final_message": True}, "continue_final_message: value True; allowed"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: value {'a': 1}; allowed"),
        (
            {"source": "a.jsonl", "chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs: value 'tokenize'; allowed: arguments of the chat template",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(values: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        read(values)
