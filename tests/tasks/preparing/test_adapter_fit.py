"""Names in lora.target_modules, and models that vLLM does not adapt: found before anything is paid for."""

import json
from pathlib import Path

import pytest

from tasks.configuration.run_config import parse
from tasks.preparing.adapter_fit import AdapterMisfit, check_targets, check_vllm_adapts
from tasks.preparing.checks import check_files
from tests.small_run import document, memory_store, plan_iteration
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model


def of(model: Path, *targets: str, **rollout: object):
    lora = {"rank": 8, "publish": "adapter", "target_modules": list(targets)}
    return parse(document("memory://adapter-fit", model, lora=lora, rollout=rollout))


def targets_refused(model: Path, *targets: str, fields: dict[str, object] | None = None) -> str:
    with pytest.raises(AdapterMisfit) as refused:
        check_targets(of(model, *targets), model, fields or {})
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_name_that_no_layer_has_is_refused_by_check_and_by_plan(model: Path):
    expected = "lora.target_modules: value 'query' names no linear layer of this model before the head; allowed, for "
    expected += "example: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    config = of(model, "q_proj", "query")
    with pytest.raises(AdapterMisfit) as refused:
        check_files(config)
    assert str(refused.value) == expected
    store = memory_store("adapter-fit")
    with pytest.raises(AdapterMisfit, match="value 'query'"):
        plan_iteration(config)
    assert not list(store.list(""))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head", "norm", "proj", "q_proj.weight", "self_attn"])
def test_what_is_no_linear_layer_is_refused(tmp_path: Path, target: str):
    untied = tiny_config(num_hidden_layers=1, tie_word_embeddings=False)
    model = save_tiny_model(tmp_path, tiny_model(untied))
    assert targets_refused(model, target).startswith(f"lora.target_modules: value {target!r} names no linear layer")


@pytest.mark.parametrize("targets", [(), ("q_proj", "self_attn.v_proj"), ("model.layers.0.mlp.down_proj",)])
def test_names_and_ends_of_names_are_taken(model: Path, targets: tuple[str, ...]):
    check_targets(of(model, *targets), model, {})


def test_of_a_mixture_of_experts_nothing_is_known(model: Path):
    check_targets(of(model, "mlp.gate"), model, {"num_local_experts": 8})


def test_a_model_that_vllm_does_not_adapt_is_refused_where_it_should(model: Path):
    adapted = of(model, vllm={"max_lora_rank": 8})
    check_vllm_adapts(adapted, {"architectures": ["Qwen2ForCausalLM"]})
    check_vllm_adapts(adapted, {"architectures": json.loads("null")})
    with pytest.raises(AdapterMisfit) as refused:
        check_vllm_adapts(adapted, {"architectures": ["FalconForCausalLM"]})
    assert str(refused.value) == (
        "rollout.vllm.max_lora_rank: value 8, and vLLM adds no adapters to this model, a FalconForCausalLM; allowed: "
        "null, and members merge each version"
    )
    check_vllm_adapts(of(model), {"architectures": ["FalconForCausalLM"]})
