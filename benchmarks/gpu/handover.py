"""A new version of the weights in a running vLLM: copied to shared memory, mapped from a cache, and changed in place.

Versions alternate between two that differ in CHANGED_SHARE of their elements, by one unit in the last place.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.model import model_config
from benchmarks.gpu.sizes import SHAPES, ModelShape, Size
from storage.weights.cache import WeightCache
from storage.weights.manifest import TensorBlock, TensorEntry
from storage.weights.tensor_sets import digest_all
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.engine import Engine
from tasks.sampling.engines.patched_weights import PatchedWeights
from tasks.sampling.engines.vllm_handover import SHARED_MEMORY
from tasks.sampling.engines.weight_tensors import as_block

CHANGED_SHARE = 0.02
_ROUNDS = 3
_CACHE_BYTES_MAX = 1 << 40
_CPU_CACHE_BYTES = 64 << 20
_CONTEXT = 256
_ROOM = 1.2  # of a version's bytes
Tensors = Mapping[str, TensorBlock]
Places = dict[str, np.ndarray[Any, np.dtype[np.int64]]]


def measure(size: Size) -> Iterator[dict[str, Any]]:
    """Bytes of a version and of its changes, and for each way the least seconds, or why it was left out."""
    shape = size.shape if size.small else SHAPES["7b"]
    first, second, places = _versions(shape, size.device)
    num_bytes = sum(block.num_bytes for block in first.values())
    arms: dict[str, Any] = {}
    found = {"bytes": num_bytes, "changed_bytes": sum(map(len, places.values())) * (4 + 2), "arms": arms}
    with tempfile.TemporaryDirectory() as folder, _engine(size, shape, Path(folder)) as engine:
        arms["whole, copied to /dev/shm"] = _copied(engine, first, num_bytes)
        yield found
        versions = _cached(Path(folder) / "cache", (first, second))
        arms["whole, mapped from the cache"] = {"seconds": min(_load(engine, 0, versions[0]) for _ in range(_ROUNDS))}
        yield found
        arms |= _patched(engine, versions, places)
        yield found


def _patched(engine: Any, versions: list[Tensors], places: Places) -> dict[str, Any]:
    """The first patch, which is compared with a whole version, and those after it; version 0 is in the engine."""
    taken_s = [_load(engine, k, PatchedWeights(versions[k % 2], k - 1, lambda: places)) for k in range(1, _ROUNDS + 2)]
    found = {"changed in place, and compared with the whole": taken_s[0], "changed in place": min(taken_s[1:])}
    if not engine._weights.takes_patches:  # noqa: SLF001 - only the engine knows why not, and logs it
        return {name: {"skipped": "this engine loads every version whole"} for name in found}
    return {name: {"seconds": seconds} for name, seconds in found.items()}


def _copied(engine: Engine, tensors: Tensors, num_bytes: int) -> dict[str, Any]:
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < _ROOM * num_bytes:
        return {"skipped": f"{free / 1e9:.1f} GB are free, and {_ROOM * num_bytes / 1e9:.1f} are needed"}
    return {"seconds": min(_load(engine, 0, tensors) for _ in range(2))}


def _load(engine: Engine, version: int, tensors: Tensors) -> float:
    began_s = time.perf_counter()
    engine.load_weights(version, tensors)
    return time.perf_counter() - began_s


@contextmanager
def _engine(size: Size, shape: ModelShape, folder: Path) -> Iterator[Any]:
    from tasks.sampling.engines.vllm_engine import VllmEngine  # noqa: PLC0415 - vLLM reads the environment when imported

    model_config(shape).save_pretrained(str(folder))
    engine = VllmEngine(
        folder,
        vocab_size=shape.vocab_size,
        dtype="bfloat16" if size.device == "cuda" else "float32",
        max_responses_in_flight=size.responses,
        context_length=_CONTEXT,
        # No token is decoded, so nothing need be compiled.
        config=VllmConfig(
            process="own",
            enforce_eager=True,
            kv_cache_memory_bytes=None if size.device == "cuda" else _CPU_CACHE_BYTES,
        ),
    )
    try:
        yield engine
    finally:
        engine.close()


def _versions(shape: ModelShape, device: str) -> tuple[Tensors, Tensors, Places]:
    """Two versions in bfloat16, and the elements in which they differ."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16, trust_remote_code=False)
    first, second, places = {}, {}, {}
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, dtype=torch.bfloat16, device=device).mul_(0.02)
        changed = torch.rand(parameter.shape, device=device) < CHANGED_SHARE
        first[name] = as_block(values)
        second[name] = as_block(values.view(torch.int16).bitwise_xor(changed.short()).view(torch.bfloat16))
        places[name] = changed.flatten().nonzero().squeeze(1).cpu().numpy()
    if device == "cuda":
        torch.cuda.empty_cache()  # for vLLM
    return first, second, places


def _cached(folder: Path, versions: tuple[Tensors, Tensors]) -> list[Tensors]:
    """The versions in the mapped memory of a weight cache."""
    folder.mkdir(mode=0o700)
    cache = WeightCache(folder, _CACHE_BYTES_MAX)
    found: list[Tensors] = []
    for version, tensors in enumerate(versions):
        digests = digest_all(tensors)
        entries = {
            name: TensorEntry(dtype=block.dtype, shape=block.shape, object="0" * 32, digest=digests[name])
            for name, block in tensors.items()
        }
        found.append(cache.store("benchmark", version, {name: (entries[name], tensors[name]) for name in tensors}))
    if min(map(len, found)) < len(versions[0]):
        raise RuntimeError(f"{folder}: the disk has no room for two versions, or half of it is needed for others")
    return found
