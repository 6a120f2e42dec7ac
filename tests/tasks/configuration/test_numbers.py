"""Numbers as Flyte's console and flytectl hand them over: all of them floats, in a protobuf Struct."""

import json
import math
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.problems import integers_restored, rounded_integers
from tasks.configuration.run_config import ConfigError, differences, digest, dump, identity, parse

MINIMAL: dict[str, Any] = {
    "run": {"url": "s3://bucket/run", "seed": 7},
    "policy": {"path": "/models/m"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "my:reward", "arguments": {"n": 3, "share": 0.5, "deep": [{"k": [1, 2.5, True]}]}}],
    "pools": {
        "rollout": {
            "cpu": 2,
            "gpus": 1,
            "tolerations": [{"key": "a", "effect": "NoExecute", "operator": "Exists", "tolerationSeconds": 30}],
        },
    },
    "lora": {"rank": 8, "publish": "adapter"},
    "rollout": {"vllm": {"max_lora_rank": 8}, "claim_ttl_s": 30},
    "evaluation": {"data": {"source": "arithmetic"}, "num_generations": 4},
}
ENDLESS = st.recursive(
    st.none() | st.booleans() | st.integers(-100, 100) | st.floats(-9, 9) | st.text(max_size=3),
    lambda leaf: st.lists(leaf, max_size=3) | st.dictionaries(st.text(max_size=3), leaf, max_size=3),
    max_leaves=8,
)


def through_a_struct(document):
    """The document as flytekit reads it out of a Struct."""
    carried = json_format.ParseDict(document, struct_pb2.Struct())
    return json.loads(json_format.MessageToJson(carried))


def test_a_document_through_flytes_console_is_the_same_configuration():
    carried = through_a_struct(MINIMAL)
    assert carried["rewards"][0]["arguments"]["n"].is_integer()
    assert isinstance(carried["run"]["seed"], float)
    assert dump(parse(carried)) == dump(parse(MINIMAL))
    assert digest(parse(carried)) == digest(parse(MINIMAL))
    given = parse(carried).rewards[0].arguments
    assert json.dumps(given, sort_keys=True) == json.dumps(MINIMAL["rewards"][0]["arguments"], sort_keys=True)
    assert parse(carried).pools.rollout.cpu == "2"


def test_a_whole_float_in_a_field_of_floats_stays_a_float():
    config = parse(MINIMAL | {"rollout": {"claim_ttl_s": 30.0}, "lora": None})
    assert isinstance(config.rollout.claim_ttl_s, float)
    assert digest(config) == digest(parse(MINIMAL | {"rollout": {"claim_ttl_s": 30}, "lora": None}))


@given(ENDLESS)
def test_what_a_struct_carries_is_restored(document):
    whole = integers_restored(json.loads(json.dumps({"all": document})))
    assert json.dumps(integers_restored(through_a_struct(whole)), sort_keys=True) == json.dumps(whole, sort_keys=True)


@pytest.mark.parametrize("largest", [1 << 53, (1 << 53) + 1, 1 << 60, -(1 << 53)])
def test_what_a_struct_has_rounded_is_refused(largest):
    for path, sections in (
        ("run.seed", {"run": MINIMAL["run"] | {"seed": largest}}),
        ("rewards.0.arguments.seed", {"rewards": [{"function": "my:reward", "arguments": {"seed": largest}}]}),
    ):
        with pytest.raises(ConfigError) as refused:
            parse(through_a_struct(MINIMAL | sections))
        [problem] = refused.value.problems
        assert problem.startswith(f"{path}: {float(largest)} given; allowed in a document whose numbers are all floats")


def test_the_same_number_in_a_file_is_what_was_written():
    arguments = {"seed": (1 << 60) + 1, "scale": 1e20}
    document = MINIMAL | {"rewards": [{"function": "my:reward", "arguments": arguments}]}
    assert parse(document).rewards[0].arguments == arguments
    assert not list(rounded_integers(document))
    assert not list(rounded_integers({"a": float((1 << 53) - 1), "b": 0.5, "c": math.inf}))


@given(ENDLESS, ENDLESS)
def test_there_is_a_difference_if_and_only_if_digests_differ(ours, theirs):
    a, b = (
        identity(parse(MINIMAL | {"rewards": [{"function": "my:reward", "arguments": {"x": value}}]}))
        for value in (ours, theirs)
    )
    assert (differences(a, b) == []) == (json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True))


@pytest.mark.parametrize(
    ("ours", "theirs", "line"),
    [
        ({"a": 1}, {"a": 1.0}, "a: 1 here, 1.0 there"),
        ({"a": True}, {"a": 1}, "a: true here, 1 there"),
        ({"a": {"b": None}}, {"a": {}}, "a.b: null here, nothing there"),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, "a.0.b: 1 here, 2 there"),
        ({"a": [1]}, {"a": [1, 2]}, "a: [1] here, [1, 2] there"),
        ({"a": {"b": 1}}, {"a": None}, 'a: {"b": 1} here, null there'),
    ],
)
def test_each_difference_has_its_path(ours, theirs, line):
    assert differences(ours, theirs) == [line]
