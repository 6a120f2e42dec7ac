import threading
import time
import tracemalloc

import numpy as np
import pytest

from storage.clock import ManualClock
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.weights import fetch
from storage.weights.cache import WeightCache
from storage.weights.manifest import TensorBlock
from storage.weights.tensor_sets import publish, read_manifest
from storage.weights.versions import bases, publish_version, pull_version
from tests.weight_chains import Counting, block, cache_at, chain, contents, everything, pulled


def test_a_machine_that_holds_the_version_before_reads_only_differences(tmp_path):
    store = MemoryStore("run")
    versions = chain(store, 9)
    whole = sum(tensor.num_bytes for tensor in versions[0].values())
    cache = cache_at(tmp_path / "cache")
    for version, tensors in enumerate(versions):
        counting = Counting(everything(store))
        assert pulled(counting, version, cache) == contents(tensors)
        assert version == 0 or counting.tensor_bytes() < 0.2 * whole
    counting = Counting(everything(store))
    assert pulled(counting, 9, cache_at(tmp_path / "cache")) == contents(versions[9])
    assert counting.read == [layout.manifest(layout.weights(9))]


def test_the_way_of_fewest_bytes_is_taken(tmp_path):
    store = MemoryStore("run")
    few, many = MemoryStore("run"), MemoryStore("run")
    chain(few, 6)
    chain(many, 6, share=0.6, far=True)
    for store, anchor_is_read in ((few, False), (many, True)):
        cache = cache_at(tmp_path / f"{anchor_is_read}")
        pulled(store, 1, cache)
        counting = Counting(everything(store))
        pulled(counting, 6, cache)
        whole = set(read_manifest(store, layout.weights(4)).objects)
        assert any(key.split("/")[-1].split(".")[0] in whole for key in counting.read) == anchor_is_read
        assert any(key.endswith("delta.json") for key in counting.read)


def test_a_machine_without_cache_starts_at_the_nearest_whole_version():
    store = MemoryStore("run")
    versions = chain(store, 9)
    counting = Counting(everything(store))
    assert pulled(counting, 9) == contents(versions[9])
    assert {key.split("/")[1] for key in counting.read} == {"00000009", "00000008", "00000000"}
    assert not [key for key in counting.read if key.endswith("delta.json")]


def test_differences_that_are_gone_are_replaced_by_a_whole_version(tmp_path):
    store = MemoryStore("run")
    versions = chain(store, 9)
    cache = cache_at(tmp_path / "cache")
    pulled(store, 5, cache)
    for key in store.list(layout.weights(7)) + store.list(layout.weights(6)):
        store.delete(key)
    assert pulled(store, 9, cache) == contents(versions[9])


@pytest.mark.parametrize("group_bytes", [1, 100, 1 << 30])
def test_tensors_come_in_groups_of_any_size(group_bytes, monkeypatch):
    monkeypatch.setattr(fetch, "GROUP_BYTES", group_bytes)
    store = MemoryStore("run")
    versions = chain(store, 7)
    assert pulled(store, 7) == contents(versions[7])


@pytest.mark.slow
def test_a_pull_takes_the_memory_of_the_tensors_and_a_bounded_part(monkeypatch):
    monkeypatch.setattr(fetch, "GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(fetch, "THREADS", 1)
    store = MemoryStore("run")
    rng = np.random.default_rng(0)
    words = {f"{n}": rng.integers(0, 1 << 16, 1 << 17, dtype=np.uint16) for n in range(64)}
    tensors = {name: TensorBlock("BF16", (1 << 17,), value.tobytes()) for name, value in words.items()}
    publish(store, layout.weights(0), tensors, {})
    for version in range(1, 4):
        base = tensors
        for name, value in words.items():
            words[name] = value + np.where(rng.random(len(value)) < 0.15, value, 0).astype(np.uint16)
        tensors = {name: TensorBlock("BF16", (1 << 17,), value.tobytes()) for name, value in words.items()}
        publish_version(store, version, tensors, {}, base=base, full_interval=100)
    tracemalloc.start()
    try:
        manifest, _ = pull_version(store, 3, None, ManualClock())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    apart = sum(
        entry.stored_bytes or 0 for v in (1, 2, 3) for entry in read_manifest(store, layout.weights(v)).tensors.values()
    )
    assert apart > 0.3 * manifest.num_bytes
    assert peak_bytes < 1.25 * manifest.num_bytes


def old_versions(store: MemoryStore, version: int) -> list[str]:
    """What a sweep deletes that keeps `version`, its bases and version 0."""
    kept = tuple(layout.weights(each) for each in bases(store, version))
    return [key for key in store.list("weights/") if not key.startswith(kept)]


@pytest.mark.slow
def test_a_sweep_during_a_pull_costs_bytes_and_no_truth(tmp_path):
    """A machine holds version 3 and is on its short way to version 10, past 5 and 10 which are stored whole."""
    store = MemoryStore("run")
    versions = chain(store, 10, full_interval=5)
    old = old_versions(store, 10)

    class Swept(Counting):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if len(self.read) == self.at:
                for swept_key in old:
                    self.delete(swept_key)
            return super().get(key, start, end)

    done = False
    for at in range(99):
        cache = cache_at(tmp_path / f"{at}")
        pulled(store, 3, cache)
        swept = Swept(everything(store))
        swept.at = at
        assert pulled(swept, 10, cache) == contents(versions[10])
        done = len(swept.read) <= at
        if done:
            break
    assert done
    assert at > 10


class Preempted(BaseException):
    pass


@pytest.mark.slow
def test_a_pull_ends_where_its_check_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "GROUP_BYTES", 1)
    store = MemoryStore("run")
    versions = chain(store, 7)
    threads = threading.active_count()
    for count in range(99):
        cache = cache_at(tmp_path / f"{count}")
        pulled(store, 5, cache)
        left = [count]

        def check(left: list[int] = left) -> None:
            assert threading.current_thread() is threading.main_thread()
            if not left[0]:
                raise Preempted
            left[0] -= 1

        try:
            _, tensors = pull_version(store, 7, cache, ManualClock(), check=check)
        except Preempted:
            assert threading.active_count() == threads
            assert len([path for path in (tmp_path / f"{count}").iterdir() if path.suffix != ".lock"]) == 1
            assert pulled(store, 7, cache) == contents(versions[7])
        else:
            assert contents(tensors) == contents(versions[7])
            break
    assert 8 < count < 99


@pytest.mark.slow
def test_a_check_ends_reading_from_a_slow_store():
    class Slow(MemoryStore):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if key.endswith(".safetensors"):
                asked.append(key)
                time.sleep(0.1)
            return super().get(key, start, end)

    asked: list[str] = []
    store = Slow("run")
    tensors = {f"{seed}": block("U8", (100,), seed) for seed in range(2000)}
    publish(store, layout.weights(0), tensors, {}, object_bytes_max=1)
    threads = threading.active_count()

    def check() -> None:
        if len(asked) > 5:
            raise Preempted

    with pytest.raises(Preempted):
        pull_version(store, 0, None, ManualClock(), check=check)
    assert 5 < len(asked) < 1000  # of 2,000
    assert threading.active_count() == threads


def test_who_could_not_keep_it_does_not_wait_for_another_of_the_machine(tmp_path):
    store = MemoryStore("run")
    versions = chain(store, 0)
    clock = ManualClock()
    name = read_manifest(store, layout.weights(0)).digest
    with WeightCache(tmp_path, 1).fetching(name, clock):
        _, tensors = pull_version(store, 0, WeightCache(tmp_path, 100), clock)
    assert clock.monotonic() == 0
    assert contents(tensors) == contents(versions[0])
