import json
from pathlib import Path
from typing import Any

import pytest

from resources.spot_trace import AWS_P3
from tasks.configuration.run_config import RunConfig, parse
from tasks.forecasting.inputs import ForecastInputs, flops_per_parameter, gather, streams
from tasks.forecasting.probe import NoProbe, PoolProbe, Probe
from tasks.learning.advantage import needs_whole_batch
from tasks.learning.presets import PRESETS
from tests.forecast_documents import document

UNPROBED = NoProbe(reason="not asked")


def config(**sections: Any) -> RunConfig:
    return parse(document(**sections))


def probe(**changes: Any) -> Probe:
    pool = PoolProbe(step_s=((1, 0.03), (8, 0.05)), start_s=45.0, losses=6, machine_h=4.0)
    return Probe(
        **{
            "run_url": "runs/a",
            "first": 0,
            "last": 2,
            "pools": {"rollout": pool, "train": pool},
            "lengths": ((0.0, 10.0), (0.5, 200.0), (1.0, 900.0)),
            "train_s_per_token": 0.002,
            "train_fixed_s": 4.0,
            "control_s": 3.0,
            **changes,
        }
    )


def sources(inputs: ForecastInputs) -> dict[str, str]:
    return {each.name: each.source for each in inputs.shown}


def test_without_a_probe_everything_says_that_it_is_configured_or_estimated():
    inputs = gather(config(), UNPROBED)
    found = sources(inputs)
    assert found["probe"] == "not asked"
    assert not any("measured in" in source for source in found.values())
    assert found["rollout: engine"].startswith("estimated: 1 x L4 (NVIDIA L4 data sheet")
    assert found["train: engine"].startswith("estimated: 1 x L4")
    assert found["response lengths"].startswith("configured")
    assert found["rollout: losses"].startswith("another kind of machine's: ")


def test_what_was_measured_wins_over_what_is_configured():
    section = {"step_s": {1: 1.0}, "train_s_per_token": 1.0, "response_median": 5}
    inputs = gather(config(forecast=section), probe())
    [pool] = inputs.pools
    assert pool.step_s == inputs.trainer.step_s == ((1, 0.03), (8, 0.05))
    assert inputs.trainer.train_s_per_token == 0.002
    assert inputs.trainer.train_fixed_s == 7.0
    assert inputs.work.lengths.quantiles == ((0.0, 10.0), (0.5, 200.0), (1.0, 900.0))
    # Six losses in four hours are 1.5 an hour; what is paid for until weights arrive is the process and their pull.
    assert pool.availability is not None
    assert pool.availability.rate_factor * AWS_P3.losses_per_node_h == pytest.approx(1.5)
    assert pool.process_s == pytest.approx(45.0 - 0.02 * 3e9 * 8 / 10e9)
    found = sources(inputs)
    measured = [name for name, source in found.items() if source == "measured in runs/a, iterations 0 to 2"]
    assert {"rollout: engine", "train: engine", "train: step", "response lengths", "rollout: losses"} <= {*measured}


def test_few_losses_are_no_rate():
    seldom = {"rollout": PoolProbe(step_s=((1, 0.03),), start_s=None, losses=2, machine_h=1.0)}
    [pool] = gather(config(), probe(pools=seldom)).pools
    assert pool.availability is not None
    assert pool.availability.rate_factor == 1.0
    assert pool.process_s == config().forecast.process_s


def test_what_is_configured_wins_over_data_sheets():
    section = {"step_s": {64: 0.02, 1: 0.01}, "train_s_per_token": 1e-4}
    inputs = gather(config(forecast=section), UNPROBED)
    assert inputs.pools[0].step_s == ((1, 0.01), (64, 0.02))
    assert inputs.trainer.train_s_per_token == 1e-4
    assert sources(inputs)["train: step"] == "configured (forecast.train_s_per_token)"


def test_a_cpu_needs_a_probe_or_figures():
    pools = {"rollout": {"gpus": 0, "usd_per_hour": 1.0}, "train": {"gpus": 0, "usd_per_hour": 1.0}}
    assert gather(config(pools=pools), probe()).pools[0].prefill_tokens_per_s == pytest.approx(8 / 0.05)
    with pytest.raises(ValueError, match=r"pools\.rollout\.gpus: value 0, and no step time is known; allowed: at l"):
        gather(config(pools=pools), UNPROBED)
    with pytest.raises(ValueError, match=r"pools\.train\.gpus: value 0, and no speed of training is known; allowed"):
        gather(config(pools=pools, forecast={"step_s": {1: 0.1}}), UNPROBED)


def test_an_unknown_model_or_accelerator_is_named():
    with pytest.raises(ValueError, match=r"forecast\.parameters_billions: missing; allowed: the model's size"):
        gather(config(forecast={"parameters_billions": None}), UNPROBED)
    with pytest.raises(LookupError, match=r"accelerator: value 'abacus'; allowed: H100"):
        gather(config(forecast={"accelerator_rollout": "abacus"}), UNPROBED)


def test_the_model_is_counted_where_its_config_is(tmp_path: Path):
    model = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    inputs = gather(config(policy={"path": str(tmp_path)}, forecast={"parameters_billions": None}), UNPROBED)
    assert sources(inputs)["model"] == f"counted from {tmp_path}/config.json"
    assert inputs.policy.weights_bytes == 2 * (64_000 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match=r"policy\.path: .*config\.json is not JSON"):
        gather(config(policy={"path": str(tmp_path)}, forecast={"parameters_billions": None}), UNPROBED)


def test_a_trainer_that_cannot_hold_an_engine_does_not_generate():
    large = {
        "parameters_billions": 70.0,
        "kv_bytes_per_token": 300_000.0,
        "accelerator_rollout": "h200",
        "accelerator_train": "h100",
    }
    inputs = gather(config(forecast=large, pools={"rollout": {"gpus": 2, "usd_per_hour": 3.0}}), UNPROBED)
    assert inputs.trainer.engines == 0
    assert "do not fit" in sources(inputs)["train: engine"]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_streaming_is_known_of_every_algorithm(preset: str):
    one = config(algorithm={"preset": preset}, sampling={"max_completion_length": 8192})
    assert streams(one) is not needs_whole_batch(one.algorithm)


@pytest.mark.parametrize(
    ("sections", "operations"),
    [
        ({}, 6),
        ({"trainer": {"gradient_checkpointing": True}}, 8),
        ({"lora": {"rank": 8}}, 4),
        ({"algorithm": {"kl_coef": 0.1}}, 8),
        ({"algorithm": {"num_mini_batches": 2}}, 8),
        ({"algorithm": {"num_mini_batches": 2, "old_logprobs": "sampler"}}, 6),
        ({"algorithm": {"num_epochs": 2}}, 14),
        ({"algorithm": {"preset": "ppo", "num_mini_batches": 1, "num_epochs": 1, "kl_coef": 0.0, "kl_in": "loss"}}, 14),
    ],
)
def test_operations_of_a_training_step(sections: dict[str, Any], operations: float):
    assert flops_per_parameter(config(**sections)) == operations
