"""The size of a decoder from its config.json, and of adapters on it, against transformers and peft."""

import peft
import pytest

from resources.model_size import ModelSize, size_from_config
from tests.tiny_model import tiny_config, tiny_model

RANK = 4


def size_of(config) -> ModelSize:
    return size_from_config(config.to_dict(), 2)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj"), ("self_attn.o_proj", "down_proj")])
def test_adapters_have_as_many_values_as_peft_gives_them(family: str, targets: tuple[str, ...]):
    config = tiny_config(family)
    module = tiny_model(config)
    settings = peft.LoraConfig(r=RANK, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM")
    adapted = peft.inject_adapter_in_model(settings, module)
    values = sum(each.numel() for name, each in adapted.named_parameters() if "lora_" in name)
    assert size_of(config).adapter_values(RANK, targets) == values


def test_where_only_the_size_is_known_adapters_are_estimated():
    config = tiny_config("llama", hidden_size=64, num_key_value_heads=4, intermediate_size=171, vocab_size=8)
    known = size_of(config)
    guessed = ModelSize(parameters=known.parameters, weight_bytes=2, kv_bytes_per_token=1.0, layers=2)
    assert guessed.adapter_values(RANK) == pytest.approx(known.adapter_values(RANK), rel=0.2)
    # Names of another family say nothing of which layers they are.
    assert known.adapter_values(RANK, ["c_attn"]) == known.adapter_values(RANK)
