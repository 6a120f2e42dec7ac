"""Families of models for the page docs/guide/models.md: tiny random ones, saved as transformers saves them.

Heads are 32 wide, because vLLM's attention on a CPU has no kernel for narrower ones.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny_model import STOP_TOKEN, VOCAB_SIZE, tiny_tokenizer

CONTEXT_LENGTH = 128
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": 1,
    "eos_token_id": STOP_TOKEN,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
}
_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def _longrope(original: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": original}
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors},
    }


@dataclass(frozen=True)
class Family:
    """A row of the page: how its model is made, and what is changed in its files afterwards."""

    title: str
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"
    edits: Callable[[dict[str, Any], dict[str, Any]], None] = lambda _config, _tensors: None

    def save(self, directory: Path) -> None:
        """Write the model and a tokenizer, the same with every call."""
        config = transformers.AutoConfig.for_model(self.model_type, **_fields(self.model_type) | dict(self.changes))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, self.auto).from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(0.0, 0.25 if "emb" in name else 0.1)
                    elif "bias" in name:
                        parameter.normal_(0.0, 0.1)
        model.save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
        document = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
        self.edits(document, tensors)
        (directory / "config.json").write_text(json.dumps(document))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _fields(model_type: str) -> dict[str, Any]:
    if model_type == "t5":
        return {"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    if model_type == "qwen2_5_vl":
        text = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
        return {"text_config": _COMMON | text, "vision_config": _VISION}
    return _COMMON


def _fp8(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for name in [name for name in tensors if "proj" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)


def _gptq(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    for name in [name for name in tensors if "proj" in name]:
        del tensors[name]
        tensors[name.replace("weight", "qweight")] = torch.zeros(4, 8, dtype=torch.int32)


def _own_code(config: dict[str, Any], _tensors: dict[str, Any]) -> None:
    config["model_type"], config["architectures"] = "mine", ["MineForCausalLM"]
    config["auto_map"] = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}


FAMILIES = [
    Family("Llama", "llama"),
    Family("Qwen2, Qwen2.5", "qwen2", {"tie_word_embeddings": True}),
    Family("Qwen3", "qwen3", _HEAD | {"tie_word_embeddings": True}),
    Family("Mistral", "mistral", {"sliding_window": None}),
    Family("Mistral, window below the context", "mistral", {"sliding_window": 64}),
    Family("Gemma", "gemma", _HEAD),
    Family("Gemma 2", "gemma2", _HEAD | {"sliding_window": 256}),
    Family("Gemma 3, text", "gemma3_text", _HEAD | {"sliding_window": 256}),
    Family("Phi-3", "phi3"),
    Family("Phi-3, longrope, context up to the original", "phi3", _longrope(CONTEXT_LENGTH)),
    Family("Phi-3, longrope, context beyond it", "phi3", _longrope(64)),
    Family("GPT-2", "gpt2"),
    Family("GPT-J", "gptj", {"rotary_dim": 16}),
    Family("GPT-NeoX, Pythia", "gpt_neox"),
    Family("OPT", "opt", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    Family("Falcon", "falcon"),
    Family("Falcon, ALiBi", "falcon", {"alibi": True}),
    Family("Bloom", "bloom", {"seq_length": CONTEXT_LENGTH}),
    Family("MPT", "mpt", {"d_model": 64, "n_heads": 2, "n_layers": 2, "max_seq_len": CONTEXT_LENGTH}),
    Family("StableLM", "stablelm"),
    Family("StarCoder2", "starcoder2", {"sliding_window": None}),
    Family("OLMo 2", "olmo2"),
    Family("OLMoE", "olmoe", _EXPERTS),
    Family("Mixtral", "mixtral", {"num_local_experts": 4}),
    Family("Qwen2-MoE", "qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 32}),
    Family("Qwen3-MoE", "qwen3_moe", _EXPERTS | _HEAD),
    Family("GPT-OSS", "gpt_oss", _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128}),
    Family("DeepSeek-V3", "deepseek_v3", _LATENT),
    Family("Granite, scaled logits", "granite", {"logits_scaling": 8.0}),
    Family("Cohere", "cohere"),
    Family("Cohere 2", "cohere2", {"sliding_window": 256}),
    Family("SmolLM3", "smollm3"),
    Family("GLM-4", "glm4", _HEAD),
    Family("Mamba", "mamba", {"intermediate_size": 128}),
    Family("Qwen3-Next", "qwen3_next", _EXPERTS | _HEAD | _LINEAR | {"shared_expert_intermediate_size": 32}),
    Family("Qwen2.5-VL", "qwen2_5_vl", auto="AutoModelForImageTextToText"),
    Family("T5", "t5", auto="AutoModelForSeq2SeqLM"),
    Family("FP8 weights", "llama", edits=_fp8),
    Family("GPTQ weights", "llama", edits=_gptq),
    Family("Code of its own", "llama", edits=_own_code),
]
