"""How long vLLM takes from nothing to its first token: with empty caches of compiled code, and with full ones."""

import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from benchmarks.equal_work import decode
from benchmarks.gpu.engines import prepare_bare_environment
from benchmarks.gpu.model import write_model
from benchmarks.gpu.sizes import Size
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import VllmConfig
from tasks.learning.pretrained import read_tensors

_CPU_CACHE_BYTES = 64 << 20
_CONTEXT = 256


def measure(size: Size) -> dict[str, Any]:
    """Seconds of the engine's start, of loading weights, and of a first token; cold, then warm."""
    prepare_bare_environment(size)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as caches:
        write_model(size.shape, Path(folder), size.device)
        blocks = read_tensors(Path(folder))
        found = {name: _once(size, Path(folder), caches, blocks) for name in ("cold", "warm")}
        files = sum(path.is_file() for path in Path(caches).rglob("*"))
    return found | {"cached_files": files}


def _once(size: Size, folder: Path, caches: str, blocks: dict[str, TensorBlock]) -> dict[str, float]:
    from tasks.sampling.engines.vllm_engine import VllmEngine  # noqa: PLC0415 - vLLM reads the environment when imported

    dtype: Literal["float32", "bfloat16"] = "bfloat16" if size.device == "cuda" else "float32"
    began_s = time.perf_counter()
    engine = VllmEngine(
        folder,
        vocab_size=size.shape.vocab_size,
        dtype=dtype,
        max_responses_in_flight=size.responses,
        context_length=_CONTEXT,
        config=VllmConfig(
            cache_dir=caches,
            kv_cache_memory_bytes=None if size.device == "cuda" else _CPU_CACHE_BYTES,
            enforce_eager=size.small,
            process="own" if size.device == "cuda" else "same",
        ),
    )
    try:
        started_s = time.perf_counter()
        engine.load_weights(0, blocks)
        loaded_s = time.perf_counter()
        decode(engine, 8, 1)
        ended_s = time.perf_counter()
    finally:
        engine.close()
    return {"start_s": started_s - began_s, "load_s": loaded_s - started_s, "first_token_s": ended_s - loaded_s}
