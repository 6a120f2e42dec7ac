import dataclasses
import json
import re
import subprocess
import sys
import typing
from dataclasses import FrozenInstanceError

import pytest
from pydantic import TypeAdapter, ValidationError

from tasks.configuration.algorithm import READ_WITH, AlgorithmConfig
from tasks.configuration.estimators import OPTIONS
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig

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
        (AlgorithmConfig, "advantage_scope", "response"),
        (AlgorithmConfig, "scale_rewards", "all"),
        (AlgorithmConfig, "clip_ratio_c", 1.0),
        (AlgorithmConfig, "gamma", 0.0),
        (AlgorithmConfig, "gae_lambda", 1.1),
        (AlgorithmConfig, "importance_sampling_cap", 0.5),
        (AlgorithmConfig, "max_staleness", -1),
        (AlgorithmConfig, "max_staleness", 9),
        (AlgorithmConfig, "overlong_buffer_length", 0),
        (AlgorithmConfig, "filter_groups_budget", 0.99),
        (AlgorithmConfig, "filter_groups_budget", float("inf")),
        (AlgorithmConfig, "clip_ratio_low", 1.5),
        (AlgorithmConfig, "clip_ratio_high", -0.1),
        (AlgorithmConfig, "kl_coef", "0.1"),
        (AlgorithmConfig, "clip_ratio", 0.2),
        (AlgorithmConfig, "loss_agg_mode", "mean"),
        (OptimizerConfig, "betas", 0.9),
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy_loss": "gspo"}, "loss_agg_mode: value 'token-mean'; allowed with policy_loss 'gspo': 'seq-mean-"),
        ({"kl_in": "reward"}, "kl_in: value 'reward'; allowed with kl_coef 0: 'loss'"),
        (
            {"filter_groups": True, "advantage_estimator": "gae"},
            "filter_groups: value true; allowed with advantage_estimator 'gae': false",
        ),
        (
            {"importance_sampling": "token", "old_logprobs": "sampler"},
            "importance_sampling: value 'token'; allowed with old_logprobs 'sampler': 'none' or 'auto'",
        ),
        (
            {"advantage_estimator": "td"},
            "advantage_estimator: value 'td'; allowed: 'grpo', 'rloo', 'reinforce_plus_plus',",
        ),
        ({"advantage_estimator": "td:"}, "'gae', or 'package.module:function'"),
        (
            {"advantage_scope": "batch"},
            "advantage_scope: value 'batch'; allowed with advantage_estimator 'grpo': 'group'",
        ),
        (
            {"gamma": 0.9, "advantage_estimator": "own:f"},
            "gamma: value 0.9; allowed with advantage_estimator 'own:f': 1.0",
        ),
        ({"scale_rewards": "none", "advantage_estimator": "rloo"}, "scale_rewards: value 'none'; allowed with adv"),
        ({"advantage_eps": 1e-4, "advantage_estimator": "rloo"}, "advantage_eps: value 0.0001; allowed with adv"),
        ({"gamma": 0.9}, "gamma: value 0.9; allowed with advantage_estimator 'grpo': 1.0, because nothing reads it"),
        ({"gae_lambda": 1.0}, "gae_lambda: value 1.0; allowed with advantage_estimator 'grpo': 0.95"),
        ({"value_clip": 0.2}, "value_clip: value 0.2; allowed with advantage_estimator 'grpo': null"),
        ({"clip_ratio_low": 0.1, "policy_loss": "reinforce"}, "clip_ratio_low: value 0.1; allowed with policy_loss"),
        ({"clip_ratio_high": 0.1, "policy_loss": "reinforce"}, "clip_ratio_high: value 0.1; allowed with policy_loss"),
        ({"clip_ratio_c": 3.0, "policy_loss": "cispo"}, "clip_ratio_c: value 3.0; allowed with policy_loss 'cispo'"),
        (
            {"filter_groups": True, "micro_batch_order": "arrival"},
            "micro_batch_order: value 'arrival'; allowed with filter_groups: 'auto' or 'plan', because taking the",
        ),
        ({"filter_groups_reward": "math"}, "filter_groups_reward: value 'math'; allowed without filter_groups: null"),
        ({"filter_groups_budget": 3.0}, "filter_groups_budget: value 3.0; allowed without filter_groups: 2.0, because"),
        (
            {"filter_groups": True, "max_staleness": 1},
            "filter_groups: value true; allowed with max_staleness 1: false, because the next iteration's prompts",
        ),
        (
            {"importance_sampling_cap": 2.0, "importance_sampling": "none"},
            "importance_sampling_cap: value 2.0; allowed with importance_sampling 'none': 3.0",
        ),
        ({"filter_groups_budget": 3.0}, "filter_groups_budget: value 3.0; allowed without filter_groups: 2.0"),
    ],
)
def test_refuses_what_is_impossible_together_or_has_no_effect(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AlgorithmConfig(**given)


def test_all_problems_of_an_algorithm_are_told_at_once():
    with pytest.raises(ValueError, match=r"^kl_in: .*\ngamma: value 0\.5; .*because nothing reads it$"):
        AlgorithmConfig(gamma=0.5, kl_in="reward")


@pytest.mark.parametrize(
    "given",
    [
        {"clip_ratio_c": 3.0},
        {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 3e-4},
        {"policy_loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
        {"policy_loss": "reinforce"},
    ],
)
def test_losses_are_honoured_with_their_own_bounds(given):
    honoured = dataclasses.asdict(AlgorithmConfig(**given))
    assert given.items() <= honoured.items()


def test_the_tables_of_the_configuration_name_fields_that_exist():
    names = {item.name for item in dataclasses.fields(AlgorithmConfig)}
    assert set(READ_WITH) | {chooser for chooser, _ in READ_WITH.values()} | OPTIONS <= names
    hints = typing.get_type_hints(AlgorithmConfig)
    for chooser, choices in READ_WITH.values():
        assert choices < set(typing.get_args(hints[chooser]))


def test_configuration_needs_no_torch():
    code = "import sys, tasks.configuration.algorithm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
