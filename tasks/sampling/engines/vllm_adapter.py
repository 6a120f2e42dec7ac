"""Adapters for vLLM: the folder in the format of the library peft from which vLLM's workers load an adapter."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from storage.weights.adapters import FIRST, SECOND, Adapter
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.vllm_names import resolve
from tasks.sampling.engines.weight_tensors import as_torch

_NAME, _NUMBER = "gleaner", 1  # vLLM knows one adapter, and each version takes the place of the one before
_PREFIX = "base_model.model."


def check_adapter(adapter: Adapter, rank_max: int) -> None:
    """Raise EngineError for an adapter that vLLM cannot load beside the model's own weights."""
    if adapter.record.rank > rank_max:
        raise EngineError(
            f"weights: adapter of rank {adapter.record.rank}; allowed by rollout.vllm.max_lora_rank: {rank_max}"
        )
    if transposed := adapter.record.transposed:
        raise EngineError(
            f"weights: the adapted layer {transposed[0]!r} is a Conv1D, which vLLM does not adapt; allowed: "
            "rollout.vllm.max_lora_rank null"
        )


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write a new folder with the adapter; raises OSError and SafetensorError."""
    folder.mkdir()
    tensors = {}
    for layer, (first, second) in adapter.layers.items():
        tensors[f"{_PREFIX}{layer}{FIRST}"] = as_torch(first)
        tensors[f"{_PREFIX}{layer}{SECOND}"] = as_torch(second)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": adapter.record.rank,
        "lora_alpha": adapter.record.alpha,
        "target_modules": sorted(adapter.layers),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def adapter_request(folder: str, *, replace: bool) -> Any:
    """What names the adapter to vLLM. replace: read the folder, though an adapter of that name is loaded."""
    return resolve("LoRARequest")(_NAME, _NUMBER, folder, load_inplace=replace)


def check_loaded(manager: Any) -> None:
    """Raise ValueError if vLLM has no place for a layer of the adapter just loaded: it would leave that out silently.

    manager: vLLM's LoRAModelManager.
    """
    if left := sorted({*manager.get_adapter(_NUMBER).loras} - {*manager.modules}):
        raise ValueError(f"vLLM does not adapt {left[0]!r}; allowed: rollout.vllm.max_lora_rank null")
