"""The refusals of `plan` for engines too large for the GPUs of a pool, or without a kernel in vLLM.

A GPU counts with the memory of its data sheet: a refused engine cannot fit, and an accepted engine may still be too
large by the memory of process and activations.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from resources.accelerators import Accelerator, accelerator
from resources.model_config import ModelConfigError, model_fields
from resources.model_size import CACHE_VALUE_BYTES, ModelSize, size_from_config
from resources.pools import PoolConfig, pool_path
from resources.prices import machine_price
from storage.errors import WrongInputError
from storage.paths import expanded
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.run_config import RunConfig
from tasks.configuration.teacher import TeacherConfig
from tasks.preparing.adapter_fit import check_vllm_adapts
from tasks.sampling.engines.choose import context_length, engine_settings

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
# Fields of config.json that only models with state-space, linear or sparse attention layers have.
_OTHER_LAYERS = ("mamba_", "ssm_", "linear_num_", "layers_block_type", "hybrid_override_pattern", "index_topk")
_CONV1D = ("gpt2", "openai-gpt")
_GB = 1e9


class EngineMisfit(WrongInputError):  # noqa: N818 - reads as what is wrong
    """The engine's weights and cache do not fit a pool's GPUs, or the engine lacks a configured kernel."""


def check_engine_fits(config: RunConfig, model_dir: Path, draft_model: str | None) -> list[str]:
    """Raise EngineMisfit for the first pool of the crew whose GPUs cannot hold the engine, or lack a kernel.

    With `engine: auto` the image decides between two engines, and the image is not known here: a pool is refused if
    neither engine fits. Returns a line for each pool on which a single engine fits.

    draft_model: the directory of the engine's draft model where this runs. A directory that is not there, because the
    run holds a copy, is passed over, as are pools without GPUs, models whose size config.json does not tell, quantised
    engines and accelerators without a data sheet. Raises AdapterMisfit for a model that vLLM does not adapt,
    ModelConfigError and EngineError for a config.json that cannot be read.
    """
    rollout, fields = engine_settings(config), model_fields(model_dir)
    pools = {name: pool for name, pool in config.pools.rollout_pools.items() if pool.gpus}
    if not pools or rollout.engine == "scripted" or rollout.device == "cpu":
        return []
    if rollout.engine != "torch":
        _check_kernels(config, rollout, fields)
    policy = _size(fields, rollout)
    models = () if policy is None else (policy, *_sized(draft_model, rollout))
    context = context_length(rollout, model_dir)
    doubts: list[str] = []
    for name, pool in pools.items():
        sheet = data_sheet(pool)
        if models and sheet is not None:
            doubts += _check_pool(config, pool_path(name), models, sheet, context)
    return doubts


def check_scorer_fits(config: RunConfig, teacher: TeacherConfig, directory: Path, longest: int) -> None:
    """Raise EngineMisfit if vLLM on the GPUs of `teacher.pool` cannot hold a teacher, or not all of them.

    Passes over what `check_engine_fits` does. teacher: with local paths. directory: the teacher's. longest: the most
    tokens of a sequence.
    """
    pool, dtype = config.pools.named(teacher.pool or ""), config.trainer.dtype
    settings = RolloutConfig(engine="vllm", dtype=dtype, vllm=teacher.vllm_of_each)
    model, sheet = _size(model_fields(directory), settings), data_sheet(pool)
    if not pool.gpus or config.trainer.device == "cpu" or model is None or sheet is None:
        return
    try:
        _check_vllm(settings, f"pools.scoring.{teacher.pool}", (model,), sheet, longest + 1)
    except EngineMisfit as error:
        raise EngineMisfit(str(error).replace("rollout.vllm", "teacher.vllm")) from None
    _check_caches(teacher, settings, sheet)


def _check_caches(teacher: TeacherConfig, settings: RolloutConfig, sheet: Accelerator) -> None:
    """Caches of a fixed size take no even shares of the memory. A teacher whose directory is gone counts as a cache."""
    vllm, named = teacher.vllm, teacher.models.values()
    if vllm.kv_cache_memory_bytes is None:
        return
    weights = sum(model.bytes for path in named for model in _sized(path, settings))
    caches = len(named) * vllm.tensor_parallel_size * float(vllm.kv_cache_memory_bytes)
    memory = vllm.tensor_parallel_size * sheet.memory_bytes
    if weights + caches > memory:
        raise EngineMisfit(
            f"teacher.vllm.kv_cache_memory_bytes: value {vllm.kv_cache_memory_bytes} for each GPU and teacher, "
            f"{caches / _GB:.1f} GB beside {weights / _GB:.1f} GB of weights, more than {vllm.tensor_parallel_size} x "
            f"{sheet.name} ({memory / _GB:.0f} GB) have; allowed: null, which shares the memory among teachers, less, "
            "or more GPUs (teacher.vllm.tensor_parallel_size, and as many gpus)"
        )


def _sized(directory: str | None, rollout: RolloutConfig) -> tuple[ModelSize, ...]:
    """The size of the model in a directory, if there is one and its size is known."""
    if directory is not None:
        with suppress(ModelConfigError):
            size = _size(model_fields(expanded(directory)), rollout)
            return () if size is None else (size,)
    return ()


def _check_pool(
    config: RunConfig, path: str, models: Sequence[ModelSize], sheet: Accelerator, context: int
) -> list[str]:
    """Raise EngineMisfit if no possible engine fits; returns the reasons of engines that do not fit.

    models: the policy and, if the engine has one, the draft model.
    """
    misfits: list[EngineMisfit] = []
    engines = [name for name in ("vllm", "torch") if config.rollout.engine in (name, "auto")]
    for engine in engines:
        try:
            if engine == "vllm":
                _check_vllm(config.rollout, path, models, sheet, context)
            else:
                _check_torch(config, path, models, sheet, context)
        except EngineMisfit as error:
            misfits.append(error)
    if len(misfits) == len(engines):
        raise misfits[-1]
    return [str(error) for error in misfits]


def _check_vllm(
    rollout: RolloutConfig, path: str, models: Sequence[ModelSize], sheet: Accelerator, context: int
) -> None:
    """VLLM does not start unless the cache holds one response of the whole context beside the weights."""
    vllm = rollout.vllm
    memory = vllm.tensor_parallel_size * sheet.memory_bytes
    one, weights = sum(model.cache_bytes(context) for model in models), sum(model.bytes for model in models)
    room = memory * vllm.gpu_memory_utilization - weights
    if vllm.kv_cache_memory_bytes is not None:
        room = min(memory - weights, vllm.tensor_parallel_size * float(vllm.kv_cache_memory_bytes))
    if room >= one:
        return
    raise EngineMisfit(
        f"{path}: the weights take {weights / _GB:.1f} GB, and vLLM's cache of one response of {context} tokens "
        f"(rollout.context_length) {one / _GB:.1f} GB{_with_drafts(models)}, more than {vllm.tensor_parallel_size} x "
        f"{sheet.name} ({memory / _GB:.0f} GB) leave it; allowed: a shorter context, more GPUs of an engine "
        "(rollout.vllm.tensor_parallel_size, and as many gpus), or larger ones"
    )


def _with_drafts(models: Sequence[ModelSize]) -> str:
    return ", both with the draft model's (rollout.speculation.draft_model)" if len(models) > 1 else ""


def _check_torch(config: RunConfig, path: str, models: Sequence[ModelSize], sheet: Accelerator, context: int) -> None:
    """The torch engine's cache has a row per response in flight, each of the longest length, in every layer.

    The draft model's cache has as many rows.
    """
    rollout = config.rollout
    reach = context
    if config.data.max_prompt_length is not None:
        reach = min(context, config.data.max_prompt_length + config.sampling.max_completion_length)
    weights = sum(model.bytes for model in models)
    row, room = reach * sum(model.kv_bytes_per_token for model in models), sheet.memory_bytes - weights
    if room >= rollout.max_responses_in_flight * row:
        return
    fewer = int(room // row)
    ways = ["rollout.engine: vllm, with an image that has vLLM", "a larger GPU"]
    ways += [f"rollout.max_responses_in_flight up to {fewer}"] if fewer > 0 else []
    because = ", which auto takes where the image has no vLLM," if rollout.engine == "auto" else ""
    raise EngineMisfit(
        f"{path}: the torch engine{because} needs {rollout.max_responses_in_flight * row / _GB:.1f} GB of cache for "
        f"{rollout.max_responses_in_flight} responses (rollout.max_responses_in_flight) of up to {reach} tokens beside "
        f"{weights / _GB:.1f} GB of weights{_with_drafts(models)}, more than 1 x {sheet.name} "
        f"({sheet.memory_bytes / _GB:.0f} GB) has; "
        f"allowed: {', or '.join(ways)}"
    )


def _check_kernels(config: RunConfig, rollout: RolloutConfig, fields: dict[str, Any]) -> None:
    """VLLM has batch-invariant kernels only for attention over all positions, or over a window of positions.

    VLLM adapts no Conv1D, and not every family of models.
    """
    if rollout.vllm.max_lora_rank is not None and (kind := fields.get("model_type")) in _CONV1D:
        raise EngineMisfit(
            f"rollout.vllm.max_lora_rank: value {rollout.vllm.max_lora_rank}, and vLLM adapts no Conv1D, which this "
            f"model, a {kind}, has; allowed: null"
        )
    check_vllm_adapts(config, fields)
    types = fields.get("layer_types")
    strange = sorted(set(types) - _ATTENTION) if isinstance(types, list) else []
    strange += sorted(name for name in fields if name.startswith(_OTHER_LAYERS) and fields[name])
    if not strange or rollout.vllm.batch_invariant is not True:
        return
    given = "auto" if config.rollout.vllm.batch_invariant == "auto" else "true"
    raise EngineMisfit(
        f"rollout.vllm.batch_invariant: value {given}, and vLLM has no batch-invariant kernel for this model, whose "
        f"config.json names {strange[0]}; allowed: false"
    )


def _size(fields: dict[str, Any], rollout: RolloutConfig) -> ModelSize | None:
    """The model's size with the engine's dtype in weights and cache; None if config.json does not tell the size."""
    if rollout.vllm.quantization is not None and rollout.engine != "torch":
        return None
    width = VALUE_BYTES[rollout.dtype]
    try:
        size = size_from_config(fields, width)
    except ValueError:
        return None
    return replace(size, kv_bytes_per_token=size.kv_bytes_per_token * width / CACHE_VALUE_BYTES)


def data_sheet(pool: PoolConfig) -> Accelerator | None:
    """The data sheet of a pool's GPUs, or None.

    None without a data sheet, or if the pool has its own price and names no GPU: the default machine then says nothing
    about the pool's GPUs.
    """
    if pool.usd_per_hour is not None and pool.accelerator is None:
        return None
    with suppress(LookupError):
        return accelerator(pool.accelerator or machine_price(pool.machine).accelerator)
    return None
