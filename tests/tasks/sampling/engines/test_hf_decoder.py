"""The comparison of the general decoder with a plain pass: which lengths it crosses, and what it finds there."""

import pytest
import torch
from transformers.models.ministral3 import modeling_ministral3

from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.hf_decoder import HuggingFaceDecoder, _stretches
from tests.tiny_model import tiny_config, tiny_model

PLACE = {"dtype": torch.float32, "device": torch.device("cpu")}


def load(config, context_length):
    decoder = HuggingFaceDecoder(config, context_length=context_length, **PLACE)
    with torch.inference_mode():
        decoder.load(tiny_model(config).state_dict().items())
    return decoder


def test_every_length_that_the_context_reaches_is_crossed_with_few_tokens():
    fields = {
        "sliding_window": 4096,
        "attention_chunk_size": None,
        "rope_parameters": {"original_max_position_embeddings": 100, "factor": 4.0},
        "max_position_embeddings": 131072,
        "floor_scale": 8192,
        "hidden_size": 50,
        "use_sliding_window": True,
        3: 5,
    }
    assert _stretches(fields, 9000) == [(0, 6), (0, 103), (4093, 6), (8189, 6), (8994, 6)]
    assert _stretches(fields, 131072) == [(0, 6), (0, 103), (4093, 6), (8189, 6), (131066, 6)]
    assert _stretches(fields, 64) == [(0, 6), (58, 6)]
    assert _stretches({}, 5) == [(0, 5)]
    assert max(count for _, count in _stretches(dict.fromkeys(("window_a", "chunk"), 1 << 20), 1 << 21)) == 6


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "opt", "gpt_neox", "falcon", "ministral3", "mpt", "gemma2"])
def test_families_pass_at_all_lengths(model_type):
    context_length = 1000
    decoder = load(tiny_config(model_type, max_position_embeddings=context_length), context_length)
    assert decoder.module


@pytest.mark.parametrize("boundary", [70, 700])
def test_a_model_that_decodes_otherwise_from_a_length_on_is_refused(monkeypatch, boundary):
    """Its queries are scaled by their position from the boundary on; here a single token's position counts as 0."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 2.0}
    config = tiny_config(
        "ministral3",
        max_position_embeddings=2000,
        sliding_window=None,
        rope_parameters=rope | {"original_max_position_embeddings": boundary},
    )
    assert load(config, 1000).module
    scale = modeling_ministral3.get_llama_4_attn_scale

    def scale_of_the_first(positions, *args):
        return scale(positions if positions.shape[-1] > 1 else torch.zeros_like(positions), *args)

    monkeypatch.setattr(modeling_ministral3, "get_llama_4_attn_scale", scale_of_the_first)
    assert load(config, boundary).module
    with pytest.raises(EngineError, match="logits differ by a relative"):
        load(config, 1000)
