"""Rotary embeddings whose frequencies depend on the length of a sequence are found by calling them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.records.records import SamplingParams
from tasks.sampling.engines.engine import EngineError, GenerationRequest
from tasks.sampling.engines.steady_positions import steady_length, unsteady
from tasks.sampling.engines.torch_engine import TorchEngine
from tests.tiny_model import plain_logprobs, save_tiny_model, tiny_config, tiny_model, weight_blocks

ORIGINAL = 50
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": ORIGINAL,
}
BY_LAYER = {
    "full_attention": LONGROPE | {"factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CHANGING = [
    ("phi3", {"original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE}),
    ("llama", {"rope_parameters": LONGROPE | {"factor": 2.0}}),
    ("gemma3_text", {"head_dim": 16, "rope_parameters": BY_LAYER, "layer_types": list(BY_LAYER)}),
]
ROPES = [
    *({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}),
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
]


def built(model_type, device="meta", **changes):
    with torch.device(device):
        return AutoModelForCausalLM.from_config(tiny_config(model_type, **changes))


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(("model_type", "changes"), CHANGING)
def test_the_last_length_with_the_first_frequencies_is_found(model_type, changes, device):
    model = built(model_type, device, **changes)
    assert steady_length(model, 256) == ORIGINAL
    assert steady_length(model, ORIGINAL) == ORIGINAL
    assert steady_length(model, 20) == 20
    assert unsteady(model, ORIGINAL) is None
    assert f"rollout.context_length: value 51; allowed: up to {ORIGINAL}" in str(unsteady(model, ORIGINAL + 1))


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_no_length_in_reach_changes_are_accepted(rope):
    assert steady_length(built("llama", rope_parameters=rope | {"rope_theta": 10000.0}), 256) == 256


def test_dynamic_frequencies_change_beyond_the_models_own_positions():
    model = built("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    assert steady_length(model, 100_000) == 256


def test_asking_changes_no_embedding():
    model = built("phi3", "cpu", **CHANGING[0][1])
    before = model.model.rotary_emb.inv_freq.clone()
    assert steady_length(model, 256) == ORIGINAL
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "falcon", "opt", "mixtral", "olmo2", "cohere", "qwen3_moe"])
def test_other_families_are_steady(model_type):
    assert steady_length(built(model_type), 256) == 256


def generated(model_dir, model, items, context_length):
    engine = TorchEngine(model_dir, max_responses_in_flight=4, context_length=context_length, device="cpu")
    engine.load_weights(0, weight_blocks(model))
    engine.start(items)
    found = {item.response: ([], []) for item in items}
    while deltas := engine.step():
        for delta in deltas:
            found[delta.response][0].extend(delta.token_ids)
            found[delta.response][1].extend(delta.logprobs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "changes"), CHANGING)
def test_up_to_that_length_the_engine_samples_from_the_model_resumed_or_not(tmp_path, model_type, changes):
    model = tiny_model(tiny_config(model_type, **changes))
    save_tiny_model(tmp_path, model)
    with pytest.raises(EngineError, match=r"^rollout\.context_length: value 51; allowed: up to 50, because"):
        TorchEngine(tmp_path, max_responses_in_flight=1, context_length=ORIGINAL + 1, device="cpu")
    sampling = SamplingParams(max_completion_length=ORIGINAL)
    items = [GenerationRequest(n, n, tuple(range(5, 8 + 9 * n)), (), 11 + n, sampling) for n in range(3)]
    undisturbed = generated(tmp_path, model, items, ORIGINAL)
    for item in items:
        token_ids, logprobs = undisturbed[item.response]
        assert len(item.prompt_ids) + len(token_ids) == ORIGINAL
        assert logprobs == pytest.approx(plain_logprobs(model, item, token_ids), abs=1e-4)
    resumed = GenerationRequest(0, 0, items[0].prompt_ids, tuple(undisturbed[0][0][:20]), 11, sampling)
    assert generated(tmp_path, model, [resumed], ORIGINAL)[0][0] == undisturbed[0][0][20:]
