import pytest

from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from storage.weights import inspection
from storage.weights.inspection import inspect_set
from storage.weights.manifest import TensorBlock
from storage.weights.tensor_sets import publish

PREFIX = layout.checkpoint(1)


@pytest.fixture
def store():
    found = MemoryStore()
    publish(found, PREFIX, {str(n): TensorBlock("U8", (9,), bytes([n] * 9)) for n in range(3)}, {}, object_bytes_max=9)
    return found


def objects(store):
    return [key for key in store.list(PREFIX) if key.endswith(".safetensors")]


def test_a_whole_set_passes(store):
    assert inspect_set(store, PREFIX) is None


@pytest.mark.parametrize("number", range(3))
def test_of_a_large_set_the_lengths_are_compared(store, monkeypatch, number):
    monkeypatch.setattr(inspection, "VERIFIED_BYTES_MAX", 0)
    key = objects(store)[number]
    body = store.get(key)
    store.put(key, b"x" * len(body))
    inspect_set(store, PREFIX)
    for wrong in (body[:-1], body + b"x", b""):
        store.put(key, wrong)
        with pytest.raises(CorruptObject, match=f"'{key}' is corrupt: not {len(body)} bytes long"):
            inspect_set(store, PREFIX)
    store.delete(key)
    with pytest.raises(CorruptObject, match=f"'{key}' is corrupt: it is missing, and its manifest names it"):
        inspect_set(store, PREFIX)


def test_of_a_small_set_every_byte_is_compared(store):
    key = objects(store)[1]
    store.put(key, store.get(key)[:-1] + b"x")
    with pytest.raises(CorruptObject, match="does not have the digest"):
        inspect_set(store, PREFIX)
