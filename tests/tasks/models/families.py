"""Tiny random models of families whose files name or shape tensors otherwise than the modules of transformers do."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

_COMMON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CHOSEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# By model_type: the fields that make it tiny. The first five are stored with one tensor for each expert. With more than
# ten of them, the order of names is not that of numbers.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_CHOSEN, "num_experts": 12},
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.5},
    "olmoe": _CHOSEN,
    "deepseek_v3": _LATENT,
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.5, "input_jitter_noise": 0.5},
    "qwen2_moe": {**_CHOSEN, "shared_expert_intermediate_size": 24},
    "glm4_moe": {**_ROUTED, "head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
    "granitemoe": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 128, "rope_parameters": {"rope_theta": 1e4}},
}
STORED_BY_EXPERT = list(MIXTURES)[:5]
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "tie_word_embeddings": True},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **(_COMMON | (MIXTURES | DENSE)[model_type] | changes))


def write_family(directory: Path, model_type: str, **changes: Any) -> tuple[Any, dict[str, Tensor]]:
    """A saved model: its module, and its tensors as save_pretrained of transformers wrote them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes), dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if parameter.ndim == 1 else 0.3)
            for name, buffer in module.named_buffers():
                if "correction_bias" in name:
                    buffer.normal_(0.0, 0.3)
    module.save_pretrained(directory)
    return module, load_file(directory / "model.safetensors")
