"""What a forecast says of the bytes of weights: differences, or an adapter's factors."""

import json
from pathlib import Path

import pytest

from tasks.configuration.run_config import parse
from tasks.forecasting.inputs import ForecastInputs, gather
from tasks.forecasting.probe import NoProbe
from tests.forecast_documents import document

# A layer's maps: 2 of 64 x 64, 2 of 64 x 32, 3 of 64 x 128.
MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
FACTORS = 4 * 2 * 8 * (2 * 128 + 2 * 96 + 3 * 192)


@pytest.fixture
def gathered(tmp_path: Path):
    """The inputs with this section `lora`."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def gathered(lora: dict[str, object] | None) -> ForecastInputs:
        whole = document(policy={"path": str(tmp_path)}, forecast={"parameters_billions": None}) | {"lora": lora}
        return gather(parse(whole), NoProbe(reason="nothing"))

    return gathered


def shown(inputs: ForecastInputs) -> tuple[str, str]:
    [found] = [each for each in inputs.shown if each.name == "weights"]
    return found.value, found.source


def test_an_adapter_alone_is_pulled_as_its_factors(gathered):
    inputs = gathered({"rank": 8, "publish": "adapter"})
    assert inputs.policy.weights_delta_bytes == FACTORS
    assert shown(inputs) == (
        "275.5 kB whole, 65.5 kB for each version after it",
        "counted: float32 factors of rank 8 (lora.publish 'adapter')",
    )
    fewer = gathered({"rank": 8, "publish": "adapter", "target_modules": ["q_proj"]})
    assert fewer.policy.weights_delta_bytes == 4 * 2 * 8 * 128
    # Nothing but the factors is written between two iterations, beside the trainer's own state.
    assert inputs.trainer.train_fixed_s < gathered({"rank": 8}).trainer.train_fixed_s


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_merged_weights_are_pulled_as_differences(gathered, lora):
    inputs = gathered(lora)
    assert inputs.policy.weights_delta_bytes == pytest.approx(inputs.policy.weights_bytes * 0.02)
    value, source = shown(inputs)
    assert value.startswith("275.5 kB whole, 5.5 kB for")
    assert source == "assumed: differences of 2%, by optimizer.learning_rate"
