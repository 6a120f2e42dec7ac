"""Refusals of the section `lora` by names alone: layers that do not exist, and models that vLLM cannot adapt."""

from pathlib import Path
from typing import Any

from storage.errors import WrongInputError
from tasks.configuration.run_config import RunConfig
from tasks.learning.pretrained import tensor_shapes

# Classes of models that vLLM 0.32 runs without adapters ("does not support LoRA yet"). Families that vLLM does not know
# run by transformers' code, to which vLLM adds adapters.
WITHOUT_ADAPTERS = frozenset(
    {
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "BloomForCausalLM",
        "Cohere2MoeForCausalLM",
        "DbrxForCausalLM",
        "FalconForCausalLM",
        "FalconMambaForCausalLM",
        "GPT2LMHeadModel",
        "GPTJForCausalLM",
        "Gemma3nForCausalLM",
        "HrmTextForCausalLM",
        "IQuestLoopCoderForCausalLM",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "OrionForCausalLM",
        "StableLmForCausalLM",
        "Step1ForCausalLM",
        "Step3TextForCausalLM",
        "Step3p5ForCausalLM",
        "Zamba2ForCausalLM",
    }
)
# Layers stored as matrices that are no linear layers before the head.
_NOT_ADAPTED = frozenset({"lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "wpe", "word_embeddings"})
_WEIGHT = ".weight"
_SHOWN_MAX = 12


class AdapterMisfit(WrongInputError):  # noqa: N818 - reads as what is wrong
    """The model has no layer of a name in lora.target_modules, or vLLM cannot adapt the model."""


def check_vllm_adapts(config: RunConfig, fields: dict[str, Any]) -> None:
    """Raise AdapterMisfit if vLLM should load adapters, but cannot for the class named in config.json."""
    rank = config.rollout.vllm.max_lora_rank
    named = fields.get("architectures")
    unable = [name for name in named if name in WITHOUT_ADAPTERS] if isinstance(named, list) else []
    if rank is not None and unable:
        raise AdapterMisfit(
            f"rollout.vllm.max_lora_rank: value {rank}, and vLLM adds no adapters to this model, a {unable[0]}; "
            "allowed: null, and members merge each version"
        )


def check_targets(config: RunConfig, model_dir: Path, fields: dict[str, Any]) -> None:
    """Raise AdapterMisfit for a name in lora.target_modules that is no linear layer before the head.

    Names are read from the headers of the files. Mixtures of experts are not checked, because transformers stores their
    layers under names unlike the module names. Raises ModelError for files that cannot be read.
    """
    if config.lora is None or not config.lora.target_modules:
        return
    if any(fields.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return
    shapes = tensor_shapes(model_dir)
    matrices = [
        name.removesuffix(_WEIGHT) for name, shape in shapes.items() if name.endswith(_WEIGHT) and len(shape) == 2
    ]
    layers = [name for name in matrices if name.rpartition(".")[2] not in _NOT_ADAPTED]
    for target in config.lora.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            ends = sorted({name.rpartition(".")[2] for name in layers})[:_SHOWN_MAX]
            raise AdapterMisfit(
                f"lora.target_modules: value {target!r} names no linear layer of this model before the head; allowed, "
                f"for example: {', '.join(ends)}"
            )
