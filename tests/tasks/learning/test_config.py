import json
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
from pydantic import TypeAdapter, ValidationError

from tasks.learning.config import AlgorithmConfig, OptimizerConfig, TrainerConfig

CONFIGS = [AlgorithmConfig, OptimizerConfig, TrainerConfig]


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_pass_their_own_checks_and_are_frozen(config):
    value = TypeAdapter(config).validate_json("{}")
    assert value == config()
    with pytest.raises(FrozenInstanceError):
        value.seed = 1


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (AlgorithmConfig, "advantage_estimator", "gae"),
        (AlgorithmConfig, "clip_ratio_low", 1.5),
        (AlgorithmConfig, "clip_ratio_high", -0.1),
        (AlgorithmConfig, "kl_coef", "0.1"),
        (AlgorithmConfig, "clip_ratio", 0.2),
        (AlgorithmConfig, "loss_agg_mode", "mean"),
        (OptimizerConfig, "beta2", 1.0),
        (OptimizerConfig, "learning_rate", float("nan")),
        (OptimizerConfig, "max_grad_norm", 0),
        (OptimizerConfig, "warmup_steps", 1.5),
        (TrainerConfig, "dtype", "float16"),
        (TrainerConfig, "micro_batch_tokens_max", 0),
        (TrainerConfig, "gradient_checkpointing", "yes"),
        (TrainerConfig, "group_timeout_s", 0),
    ],
)
def test_refuses_a_bad_value_and_names_the_field(config, field, value):
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(config).validate_json(json.dumps({field: value}))
    assert raised.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_falling_schedule_needs_total_steps_after_the_warm_up(schedule):
    with pytest.raises(ValueError, match="total_steps: value null"):
        OptimizerConfig(schedule=schedule)
    with pytest.raises(ValueError, match="warmup_steps: value 5; allowed: less than total_steps"):
        OptimizerConfig(schedule=schedule, total_steps=5, warmup_steps=5)
    OptimizerConfig(schedule=schedule, total_steps=6, warmup_steps=5)


def test_configuration_needs_no_torch():
    code = "import sys, tasks.learning.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
