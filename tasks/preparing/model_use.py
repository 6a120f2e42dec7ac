"""The use of a run's model: the possible engines, the length of sequences, and the training of adapters or a critic."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.configuration.lora import LoraConfig
from tasks.configuration.run_config import RunConfig
from tasks.sampling.engines.choose import context_length
from tasks.sampling.engines.vllm_names import installed_version


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """The settings that decide whether a model is usable.

    Attributes:
        torch: The torch engine may generate; with `vllm` both, where the machines of an `auto` crew decide.
        vllm: vLLM may generate.
        on_cpu: The engine certainly has no GPU.
        dtype: The dtype of the engine.
        context_length: The most tokens of prompt and response together.
        trainer_dtype: The dtype of the trainer's passes.
        trainer_on_cpu: The trainer certainly has no GPU.
        lora: The section `lora`; None without adapters.
        critic: The run trains a critic.
    """

    torch: bool
    vllm: bool
    on_cpu: bool = False
    dtype: Literal["float32", "bfloat16", "float16"]
    context_length: int
    trainer_dtype: Literal["float32", "bfloat16"] = "float32"
    trainer_on_cpu: bool = False
    lora: LoraConfig | None = None
    critic: bool = False


def use_of(config: RunConfig, model_dir: Path) -> ModelUse:
    """The use that a run makes of the model in a directory; raises EngineError for its context."""
    rollout = config.rollout
    has_gpus = any(pool.gpus for pool in config.pools.rollout_pools.values())
    # vLLM on a machine without a GPU is not what `auto` takes.
    may_be_vllm = rollout.engine == "auto" and rollout.device != "cpu" and (has_gpus or bool(installed_version()))
    return ModelUse(
        torch=rollout.engine in ("auto", "torch"),
        vllm=rollout.engine == "vllm" or may_be_vllm,
        on_cpu=rollout.device == "cpu",
        dtype=rollout.dtype,
        context_length=context_length(rollout, model_dir),
        trainer_dtype=config.trainer.dtype,
        trainer_on_cpu=config.trainer.device == "cpu",
        lora=config.lora,
        critic=config.algorithm.estimator.needs_critic,
    )
