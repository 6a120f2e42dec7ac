"""One weight version of a policy with LoRA adapters, published merged and published alone: bytes and seconds.

Steps are synthetic: as after AdamW's first steps, each element of a factor moves by the learning rate, up or down.
"""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.reporting import medians
from benchmarks.weight_steps import make_random_policy
from storage import layout
from storage.clock import SystemClock
from storage.local import LocalStore
from storage.weights.adapters import publish_adapter
from storage.weights.cache import WeightCache
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.tensor_sets import publish
from storage.weights.versions import publish_version, pull_version
from tasks.configuration.lora import LoraConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.adapted_policy import AdaptedPolicy
from tasks.learning.pretrained import read_tensors
from tasks.sampling.engines.weight_tensors import as_block, as_torch
from tasks.sampling.session.pulled_model import pull_model

CACHE_BYTES_MAX = 1 << 36
STEPS_BEFORE = 10  # so that B is not zero


def measure_adapters(
    *, hidden: int, layers: int, rank: int, learning_rates: tuple[float, ...], rounds: int
) -> list[dict[str, Any]]:
    """Bytes of a version, seconds to publish it, and to get the model from it on a machine that holds the last one."""
    with tempfile.TemporaryDirectory() as temporary:
        model = make_random_policy(Path(temporary) / "model", hidden=hidden, layers=layers)
        return [
            row
            for number, rate in enumerate(learning_rates)
            for row in _at(model, Path(temporary) / str(number), rank, rate, rounds)
        ]


def _at(model: Path, folder: Path, rank: int, rate: float, rounds: int) -> list[dict[str, Any]]:
    first = read_tensors(model)
    start = {name: as_torch(block) for name, block in first.items()}
    lora = LoraConfig(rank=rank, alpha=2.0 * rank, publish="adapter")
    policy = AdaptedPolicy(model, start, TrainerConfig(device="cpu"), lora, seed=0)
    for step in range(STEPS_BEFORE):
        _step(policy, rate, step)
    times_s: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}

    for number in range(rounds):
        place = folder / str(number)
        place.mkdir(parents=True)
        base = {name: as_block(tensor.clone()) for name, tensor in policy.tensors(torch.bfloat16).items()}
        old = {name: as_block(tensor.clone()) for name, tensor in policy.each_factor()}
        _step(policy, rate, STEPS_BEFORE + number)
        for arm in ("merged", "adapter") if number % 2 else ("adapter", "merged"):
            measured = _merged(policy, base, place) if arm == "merged" else _alone(policy, first, old, place)
            published_s, pulled_s, manifest = measured
            times_s.setdefault(f"{arm} published", []).append(published_s)
            times_s.setdefault(f"{arm} pulled", []).append(pulled_s)
            sizes[arm] = sum(entry.bytes for entry in manifest.objects.values())
        shutil.rmtree(place)
    whole = sum(block.num_bytes for block in first.values())
    middle = medians(times_s)
    return [
        {
            "measured": f"LoRA of rank {rank} at {rate:g}, {arm}",
            "MB": whole / 1e6,
            "of a whole version": f"{sizes[arm] / whole:.2%}",
            "bytes": sizes[arm],
            "publish s": middle[f"{arm} published"],
            "pull s": middle[f"{arm} pulled"],
        }
        for arm in ("merged", "adapter")
    ]


def _merged(policy: AdaptedPolicy, base: dict[str, TensorBlock], place: Path) -> tuple[float, float, Manifest]:
    store, cache = LocalStore(place / "merged", fsync=False), _cache(place / "merged-cache")
    publish(store, layout.weights(0), base, {})
    pull_version(store, 0, cache, SystemClock())
    began_s = time.perf_counter()
    blocks = {name: as_block(tensor) for name, tensor in policy.tensors(torch.bfloat16).items()}
    manifest = publish_version(store, 1, blocks, {}, base=base, full_interval=10)
    published_s = time.perf_counter()
    pull_model(store, 1, cache, SystemClock())
    return published_s - began_s, time.perf_counter() - published_s, manifest


def _alone(
    policy: AdaptedPolicy, first: dict[str, TensorBlock], old: dict[str, TensorBlock], place: Path
) -> tuple[float, float, Manifest]:
    store, cache = LocalStore(place / "alone", fsync=False), _cache(place / "alone-cache")
    assert policy.adapter is not None
    publish(store, layout.weights(0), first, {})
    publish_adapter(store, 1, old, policy.adapter, {})
    pull_model(store, 1, cache, SystemClock())
    began_s = time.perf_counter()
    factors = {name: as_block(tensor) for name, tensor in policy.each_factor()}
    manifest = publish_adapter(store, 2, factors, policy.adapter, {})
    published_s = time.perf_counter()
    pull_model(store, 2, cache, SystemClock())
    return published_s - began_s, time.perf_counter() - published_s, manifest


def _cache(folder: Path) -> WeightCache:
    folder.mkdir(parents=True)
    return WeightCache(folder, CACHE_BYTES_MAX)


@torch.no_grad()
def _step(policy: AdaptedPolicy, rate: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters().values():
        parameter.add_((torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1) * rate)
