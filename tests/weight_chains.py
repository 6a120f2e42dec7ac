"""Chains of small weight versions, each an optimizer step after the one before, and stores that show what is read."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from storage.clock import ManualClock
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.weights.cache import WeightCache
from storage.weights.manifest import ITEM_BYTES, TensorBlock
from storage.weights.tensor_sets import publish
from storage.weights.versions import publish_version, pull_version

Tensors = dict[str, TensorBlock]


def block(dtype: str, shape: tuple[int, ...], seed: int) -> TensorBlock:
    size = ITEM_BYTES[dtype] * math.prod(shape)
    return TensorBlock(dtype, shape, np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes())


def first() -> Tensors:
    return {
        "embed": block("BF16", (64, 32), 1),
        "frozen": block("BF16", (50, 40), 2),
        "norm": block("F32", (512,), 3),
        "nothing": block("F32", (0,), 4),
    }


def stepped(tensors: Tensors, seed: int, share: float = 0.02, *, far: bool = False) -> Tensors:
    """After an optimizer step: some elements of all but `frozen` are one unit away, or `far`."""
    new = dict(tensors)
    for name in ("embed", "norm"):
        size = ITEM_BYTES[tensors[name].dtype]
        words = np.frombuffer(bytearray(tensors[name].data), f"<u{size}")
        rng = np.random.default_rng(seed)
        words += ((rng.random(len(words)) < share) * (rng.integers(1, 1 << 6 * size, len(words)) if far else 1)).astype(
            words.dtype
        )
        new[name] = replace(tensors[name], data=words.tobytes())
    return new


def chain(
    store: MemoryStore, last: int, full_interval: int = 4, share: float = 0.02, *, far: bool = False
) -> list[Tensors]:
    """Versions 0 to `last`, published; what they hold."""
    versions = [first()]
    publish(store, layout.weights(0), versions[0], {})
    for version in range(1, last + 1):
        versions.append(stepped(versions[-1], version, share, far=far))
        publish_version(store, version, versions[-1], {}, base=versions[-2], full_interval=full_interval)
    return versions


def contents(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in tensors.items()}


def pulled(store: MemoryStore, version: int, cache: WeightCache | None = None) -> dict[str, object]:
    manifest, tensors = pull_version(store, version, cache, ManualClock())
    assert list(tensors) == list(manifest.tensors)
    return contents(tensors)


def cache_at(path: Path) -> WeightCache:
    path.mkdir(exist_ok=True)
    return WeightCache(path, 1 << 24)


class Counting(MemoryStore):
    """Notes the keys that are read."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__("run")
        self._objects.update(objects)
        self.read: list[str] = []

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.read.append(key)
        return super().get(key, start, end)

    def tensor_bytes(self) -> int:
        return sum(len(self._objects[key]) for key in set(self.read) if key.endswith(".safetensors"))


def everything(store: MemoryStore) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list("")}
