import json

import pytest
from pydantic import TypeAdapter, ValidationError

from storage.records.records import SamplingParams
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.sampling import SamplingConfig


@pytest.mark.parametrize(
    ("config", "values", "field"),
    [
        (RolloutConfig, {"engine": "sglang"}, "engine"),
        (RolloutConfig, {"dtype": "int8"}, "dtype"),
        (RolloutConfig, {"device": "tpu"}, "device"),
        (RolloutConfig, {"max_responses_in_flight": 0}, "max_responses_in_flight"),
        (RolloutConfig, {"max_responses_in_flight": "8"}, "max_responses_in_flight"),
        (RolloutConfig, {"context_length": 1}, "context_length"),
        (RolloutConfig, {"flush_interval_s": 0.01}, "flush_interval_s"),
        (RolloutConfig, {"flush_interval_s": 61}, "flush_interval_s"),
        (RolloutConfig, {"flush_seconds": 5}, "flush_seconds"),
        (SamplingConfig, {"temperature": -0.1}, "temperature"),
        (SamplingConfig, {"temperature": float("inf")}, "temperature"),
        (SamplingConfig, {"top_p": 0}, "top_p"),
        (SamplingConfig, {"top_p": 1.01}, "top_p"),
        (SamplingConfig, {"top_k": -1}, "top_k"),
        (SamplingConfig, {"max_completion_length": 0}, "max_completion_length"),
    ],
)
def test_bad_values_are_refused_by_name(config, values, field):
    with pytest.raises(ValidationError, match=field):
        TypeAdapter(config).validate_json(json.dumps(values))


def test_defaults_are_valid_and_sample_from_the_policy_itself():
    TypeAdapter(RolloutConfig).validate_json("{}")
    config = TypeAdapter(SamplingConfig).validate_json('{"max_completion_length": 7, "temperature": 1}')
    assert config.params((2, 3)) == SamplingParams(max_completion_length=7, stop_token_ids=(2, 3))
