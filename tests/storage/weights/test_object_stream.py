"""Reading a set object by object: verified, each byte once, with a window of them in memory."""

import tracemalloc

import numpy as np
import pytest

from storage.stores.memory import MemoryStore
from storage.stores.metered import MeteredStore
from storage.stores.store import CorruptObject, ObjectMissing
from storage.weights import tensor_sets
from storage.weights.tensor_sets import TensorBlock, names_by_object, publish, stream

PREFIX = "checkpoints/00000001/"
OBJECT_BYTES = 1 << 20


def block(seed, num_bytes):
    return TensorBlock("U8", (num_bytes,), np.random.default_rng(seed).bytes(num_bytes))


def published(store, sizes):
    tensors = {f"t{number:02}": block(number, size) for number, size in enumerate(sizes)}
    return publish(store, PREFIX, tensors, {}, OBJECT_BYTES), tensors


@pytest.mark.parametrize("sizes", [(3,), (0, 5, 0), (300_000,) * 9, (2_500_000, 10, 700_000, 700_000, 1)])
@pytest.mark.parametrize("window_bytes", [1, 1_500_000, 1 << 30])
def test_every_object_comes_in_order_with_its_tensors_and_each_byte_is_read_once(sizes, window_bytes):
    store = MemoryStore()
    manifest, tensors = published(store, sizes)
    metered = MeteredStore(store)
    objects = names_by_object(manifest)
    found = list(stream(metered, PREFIX, manifest, objects, window_bytes))
    assert [sorted(each) for each in found] == [sorted(names) for names in objects]
    assert [name for names in objects for name in names] == list(tensors)
    assert all(bytes(each[name].data) == tensors[name].data for each in found for name in each)
    assert metered.requests.bytes_read == sum(entry.bytes for entry in manifest.objects.values())


def test_some_objects_are_read_alone():
    store = MemoryStore()
    manifest, tensors = published(store, (600_000,) * 6)
    objects = names_by_object(manifest)[1::2]
    found = list(stream(store, PREFIX, manifest, objects))
    assert [set(each) for each in found] == [set(names) for names in objects]
    assert len(found) == 3
    assert {name: bytes(each[name].data) for each in found for name in each} == {
        name: tensors[name].data for names in objects for name in names
    }


def test_what_is_in_memory_is_a_window_and_not_the_set():
    store = MemoryStore()
    manifest, _ = published(store, (OBJECT_BYTES,) * 48)
    tracemalloc.start()
    try:
        for each in stream(store, PREFIX, manifest, names_by_object(manifest), 4 * OBJECT_BYTES):
            del each
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A memory store answers with copies of the ranges, of which there is one for each thread.
    assert peak_bytes < 20 * OBJECT_BYTES


@pytest.mark.parametrize("damage", ["changed", "cut off", "too long", "lost"])
def test_a_damaged_object_is_named_when_it_is_reached_and_nothing_comes_after_it(damage):
    store = MemoryStore()
    manifest, tensors = published(store, (600_000,) * 6)
    objects = names_by_object(manifest)
    key = f"{PREFIX}{manifest.tensors[objects[2][0]].object}.safetensors"
    body = store.get(key)
    store.delete(key)
    changed = {"changed": body[:-1] + bytes([body[-1] ^ 1]), "cut off": body[:-9], "too long": body + b"x"}
    if damage in changed:
        store.put(key, changed[damage])
    found = stream(store, PREFIX, manifest, objects)
    for names in objects[:2]:
        each = next(found)
        assert {name: bytes(each[name].data) for name in each} == {name: tensors[name].data for name in names}
    with pytest.raises(ObjectMissing if damage == "lost" else CorruptObject, match=key):
        next(found)
    assert list(found) == []


def test_differences_are_refused_before_anything_is_read():
    store = MemoryStore()
    manifest, _ = published(store, (5,))
    entry = tensor_sets.TensorEntry(
        dtype="U8", shape=(5,), object=manifest.tensors["t00"].object, digest=manifest.tensors["t00"].digest, version=3
    )
    other = tensor_sets.Manifest(tensors={"t00": entry}, objects=manifest.objects, metadata={})
    with pytest.raises(ValueError, match="'t00' as a difference"):
        stream(store, PREFIX, other, [["t00"]])
