"""vLLM's settings, derived from ours, and its environment variables; readable errors for what its release refuses."""

import atexit
import functools
import json
import logging
import math
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.paths import expanded, folder_for_sockets, own_folder
from tasks.configuration.rollout import SpeculationConfig, VllmConfig
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.vllm_drafts import check_runner, speculative_config
from tasks.sampling.engines.vllm_names import installed_version, resolve

log = logging.getLogger(__name__)
CPU_BLOCK_SIZE = 32
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The names that families of models give to the same sizes.
_HEADS, _HIDDEN = ("num_attention_heads", "n_head", "n_heads"), ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_KV_BYTES_MAX_CPU = 4 << 30
_BATCH_INVARIANT_CAPABILITY = 80
OWNER = "GLEANER_VLLM_OWNER"  # the process whose end also ends vLLM's workers, see vllm_worker
# Compiled code: of vLLM, by torch.compile, and of single kernels.
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SAMPLERS = {True: "KeyedSlots", False: "KeyedBatchRows"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long vLLM in a process of its own may take, in seconds; beyond a limit the engine counts as dead.

    Attributes:
        start_s: Until vLLM serves: a large model is read and compiled in minutes.
        load_s: Until new weights are in place.
        step_s: Until the next token of any response in flight, and for taking or aborting requests; longer than the
            longest prefill.
    """

    start_s: float = 900.0
    load_s: float = 600.0
    step_s: float = 120.0


LIMITS = Limits()


def prepare_environment(config: VllmConfig, limits: Limits = LIMITS) -> str:
    """Set vLLM's environment variables, except those the user has set; return the kind of device it finds, or "".

    The environment of the member's process changes, because vLLM reads variables on import and its processes inherit
    them.
    """
    _set_defaults(
        {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(limits.start_s)),
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(math.ceil(limits.step_s)),
            # A process with threads, such as ours, must not fork.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            # FlashInfer compiles its sampler with nvcc, which images without a CUDA toolkit lack; vLLM warms it up at
            # its start even where our own code samples.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
    )
    _set_defaults({"VLLM_RPC_BASE_PATH": _sockets().name})
    if config.cache_dir is not None:
        _set_defaults({name: str(expanded(config.cache_dir) / part) for name, part in CACHES.items()})
    # Else torch takes a folder of TMPDIR that another user may have made, and runs the code in it.
    _set_defaults({"TORCHINDUCTOR_CACHE_DIR": str(_inductor_folder())})
    os.environ[OWNER] = str(os.getpid())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if config.process == "same" else "1"
    platform = resolve("current_platform")
    if platform.is_cpu():
        # Several members share a machine, so none binds itself to cores. vLLM's compiler would delay the first token by
        # a minute.
        _set_defaults({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"})
    elif config.batch_invariant is True and platform.has_device_capability(_BATCH_INVARIANT_CAPABILITY):
        _set_defaults({"VLLM_BATCH_INVARIANT": "1"})
    elif config.batch_invariant is True:
        log.info(
            "vLLM has no batch-invariant kernels for this device; responses depend on their batch in the last bits"
        )
    return str(platform.device_type)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Have what is started in the block listen on the loopback alone: an engine does not span machines."""
    before = {name: os.environ.get(name) for name in _INTERFACES}
    os.environ |= dict.fromkeys(_INTERFACES, "lo")
    try:
        yield
    finally:
        # A trainer that generates first may have to reach other machines afterwards.
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@functools.cache
def _sockets() -> "tempfile.TemporaryDirectory[str]":
    """Where vLLM's processes meet as long as this process lives; vLLM reads only once where that is."""
    folder = folder_for_sockets("gleaner-vllm-")
    atexit.register(folder.cleanup)
    return folder


def _inductor_folder() -> Path:
    """The folder of code that torch compiles, which the user's next process finds again.

    If that folder cannot be made the user's own, the code lasts as long as the process.
    """
    try:
        return own_folder(Path(tempfile.gettempdir()) / f"gleaner-inductor-{os.geteuid()}")
    except OSError as error:
        log.warning("%s: compiled code is not kept", error)
        return own_folder(Path(_sockets().name) / "inductor")


def build_vllm_config(
    config: VllmConfig,
    speculation: SpeculationConfig,
    model_dir: Path,
    *,
    dtype: str,
    max_responses_in_flight: int,
    context_length: int,
    architecture: str,
    on_cpu: bool,
    keyed: bool,
    further: Mapping[str, Any] | None = None,
) -> Any:
    """Build vLLM's configuration object; EngineError when the installed release refuses the settings.

    architecture: the model class to use if config.json does not name one.
    keyed: tokens are drawn with our noise, or else with vLLM's own, which cannot be repeated.
    further: vLLM's own arguments beside these, or in their place.
    """
    given = {
        "model": str(model_dir),
        "runner": "generate",
        "hf_overrides": {} if _model(model_dir).get("architectures") else {"architectures": [architecture]},
        "tokenizer": None,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "dummy",
        "dtype": dtype,
        "max_model_len": context_length,
        "max_num_seqs": max_responses_in_flight,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "tensor_parallel_size": config.tensor_parallel_size,
        "quantization": config.quantization,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "enable_prefix_caching": True,
        # Without keys, every member needs noise of its own.
        "seed": 0 if keyed else secrets.randbits(31),
        "logprobs_mode": "processed_logits" if keyed else "raw_logprobs",
        **_adapters(config),
        "speculative_config": speculative_config(speculation),
        "per_request_spec_decode_metrics": "none" if speculation.drafts == 0 else "summary",
        "worker_extension_cls": "tasks.sampling.engines.vllm_worker.WorkerExtension",
        "disable_log_stats": True,
        **(further or {}),
    }
    if on_cpu:
        given["block_size"] = CPU_BLOCK_SIZE
        given["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes or cpu_cache_bytes(
            model_dir, dtype, max_responses_in_flight, context_length
        )
        if speculation.drafting_model is not None and config.kv_cache_memory_bytes is None:
            given["kv_cache_memory_bytes"] += cpu_cache_bytes(
                Path(speculation.drafting_model), dtype, max_responses_in_flight, context_length
            )
        if config.process == "same":
            given["distributed_executor_backend"] = "uni"
    try:
        # As vLLM's own `LLM`: its default of max_num_batched_tokens is up to eight times that without a context.
        built = resolve("EngineArgs")(**given).create_engine_config(resolve("UsageContext").LLM_CLASS)
        v2 = bool(built.use_v2_model_runner)
    except Exception as error:
        raise EngineError(
            f"vLLM {installed_version()} refuses this model or rollout.vllm: {' '.join(str(error).split())}"
        ) from error
    check_runner(speculation, v2=v2)
    if keyed:
        built.model_config.logits_processors = [f"tasks.sampling.engines.vllm_sampler:{_SAMPLERS[v2]}"]
    return built


def cpu_cache_bytes(model_dir: Path, dtype: str, max_responses_in_flight: int, context_length: int) -> int:
    """The bytes of a key-value cache that holds every response at its maximal length, at most 4 GiB."""
    model = _model(model_dir)
    model = model.get("text_config") or model
    heads, hidden, layers = (_first_of(model, names) for names in (_HEADS, _HIDDEN, _LAYERS))
    if not (heads and hidden and layers):
        return _KV_BYTES_MAX_CPU
    head_dim = model.get("head_dim") or hidden // heads
    per_token: int = 2 * layers * (model.get("num_key_value_heads") or heads) * head_dim * _BYTES[dtype]
    blocks = max_responses_in_flight * math.ceil(context_length / CPU_BLOCK_SIZE) + 8
    return min(_KV_BYTES_MAX_CPU, max(8 << 20, blocks * CPU_BLOCK_SIZE * per_token))


def _first_of(model: dict[str, Any], names: tuple[str, ...]) -> int:
    """The value of the first of these fields that the model has and that is not 0; 0 without such a field."""
    return next((int(model[name]) for name in names if model.get(name)), 0)


def _adapters(config: VllmConfig) -> dict[str, Any]:
    if config.max_lora_rank is None:
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": config.max_lora_rank}


def _model(model_dir: Path) -> dict[str, Any]:
    """The content of the model's config.json."""
    content: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return content


def _set_defaults(values: dict[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)
