"""What it costs to give vLLM's processes a new version: bytes and seconds, whole and as changed elements alone.

No vLLM runs here: a process of its own receives the tensors as a worker does and copies each, as to a device. The bytes
that a worker reads are those it is handed.
"""

import os
import re
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reporting import Target
from storage.clock import SystemClock
from storage.records import layout
from storage.stores.local import LocalStore
from storage.weights.cache import WeightCache
from storage.weights.manifest import TensorBlock
from storage.weights.tensor_sets import publish
from storage.weights.versions import publish_version
from tasks.sampling.engines.patched_weights import PatchedWeights
from tasks.sampling.engines.vllm_handover import Handed, handed, received
from tasks.sampling.session.pulled_model import pull_model

CHANGED_SHARE = 0.02
CACHE_BYTES_MAX = 1 << 36
_TENSOR_BYTES = 24 << 20


def measure_handover(sizes: list[int], rounds: int) -> tuple[list[dict[str, Any]], list[Target]]:
    """Rows for weights of these bytes, and the targets that the largest meets or misses."""
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for num_bytes in sizes:
            rows += _rows(num_bytes, rounds, pool)
    largest = {row["arm"]: row for row in rows[-3:]}
    mapped, patched = largest["whole, mapped from the cache"], largest["changed elements"]
    return rows, [
        Target("bytes_written_per_mapped_version", float(mapped["bytes written"]), "<= 0"),
        Target("bytes_of_a_patched_version_over_whole", patched["bytes read"] / mapped["bytes read"], "<= 0.065"),
    ]


def receive(given: Handed) -> tuple[int, float]:
    """In another process: the bytes that were handed over, and the seconds to copy them all."""
    began_s = time.perf_counter()
    num_bytes = sum(tensor.clone().nbytes for _, tensor in received(given))
    return num_bytes, time.perf_counter() - began_s


def _rows(num_bytes: int, rounds: int, pool: Executor) -> list[dict[str, Any]]:
    rng, clock = np.random.default_rng(0), SystemClock()
    before = {f"{k}": rng.integers(0, 1 << 15, n // 2, dtype=np.uint16) for k, n in enumerate(_split(num_bytes))}
    after = {name: words ^ (rng.random(len(words)) < CHANGED_SHARE).astype(np.uint16) for name, words in before.items()}
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "cache").mkdir()
        store = LocalStore(Path(temporary) / "run", fsync=False)
        cache = WeightCache(Path(temporary) / "cache", CACHE_BYTES_MAX)
        publish(store, layout.weights(0), _blocks(before), {})
        publish_version(store, 1, _blocks(after), {}, base=_blocks(before), full_interval=10**6)
        pull_model(store, 0, cache, clock)
        _, pulled = pull_model(store, 1, cache, clock, held=0)
        assert isinstance(pulled, PatchedWeights)
        began_s = time.perf_counter()
        patches = pulled.patches()
        assert patches is not None
        gathered_s = time.perf_counter() - began_s
        parts = {f"{name}.indices": each.indices for name, each in patches.items()}
        parts |= {f"{name}.values": each.values for name, each in patches.items()}
        arms: dict[str, tuple[Mapping[str, TensorBlock], float]] = {
            "whole, copied to shared memory": (_blocks(after), 0.0),
            "whole, mapped from the cache": (dict(pulled), 0.0),
            "changed elements": (parts, gathered_s),
        }
        return [
            {"measured": "hand-over to a process", "MB": num_bytes / 1e6, "arm": arm} | _handed(*given, rounds, pool)
            for arm, given in arms.items()
        ]


def _handed(tensors: Mapping[str, TensorBlock], before_s: float, rounds: int, pool: Executor) -> dict[str, Any]:
    best_s = float("inf")
    for _ in range(rounds):
        began_s, written = time.perf_counter(), _written()
        with handed(tensors, here=False) as given:
            written = _written() - written
            read, _ = pool.submit(receive, given).result()
        best_s = min(best_s, time.perf_counter() - began_s + before_s)
    return {"bytes written": written, "bytes read": read, "seconds": best_s}


def _written() -> int:
    """The bytes that this process has given to write calls."""
    found = re.search(r"wchar: (\d+)", Path(f"/proc/{os.getpid()}/io").read_text(encoding="utf-8"))
    return int(found[1]) if found else 0


def _split(num_bytes: int) -> list[int]:
    return [min(_TENSOR_BYTES, num_bytes - start) for start in range(0, num_bytes, _TENSOR_BYTES)]


def _blocks(words: Mapping[str, Any]) -> dict[str, TensorBlock]:
    return {name: TensorBlock("BF16", (len(each),), each.data) for name, each in words.items()}
