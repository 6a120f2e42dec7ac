"""Versions stored as adapters: what is published once, what is refused, and what the version needs."""

from dataclasses import replace

import numpy as np
import pytest

from storage.clock import SystemClock
from storage.records import layout, records
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing
from storage.weights.adapters import AdapterRecord, adapter_of, adapter_record, loaded_bytes, publish_adapter
from storage.weights.manifest import TensorBlock
from storage.weights.tensor_sets import publish, read_manifest
from storage.weights.versions import bases, pull_version

CLOCK = SystemClock()
RECORD = AdapterRecord(rank=2, alpha=4.0)


def block(*shape, fill=1.0, dtype="F32"):
    return TensorBlock(dtype, shape, np.full(shape, fill, np.float32).tobytes()[: np.prod(shape) * 4])


BASE = {"a.weight": block(3, 5), "b.weight": block(4, 4), "norm": block(7)}
SHAPES = {name: each.shape for name, each in BASE.items()}
FACTORS = {
    "a.lora_A.weight": block(2, 5),
    "a.lora_B.weight": block(3, 2),
    "b.lora_A.weight": block(2, 4),
    "b.lora_B.weight": block(4, 2),
}


@pytest.fixture
def store():
    store = MemoryStore("adapters")
    publish(store, layout.weights(0), BASE, {})
    return store


def test_it_is_pulled_as_it_was_published_and_refers_to_version_0(store):
    manifest = publish_adapter(store, 3, FACTORS, RECORD, {"source": "train"}, before_manifest=lambda: {"at": 1.0})
    assert manifest == read_manifest(store, layout.weights(3))
    assert manifest.metadata == {
        "source": "train",
        "at": 1.0,
        "adapter": {"format": 1, "rank": 2, "alpha": 4.0, "transposed": []},
    }
    found, tensors = pull_version(store, 3, None, CLOCK)
    adapter = adapter_of(found, 3, tensors, SHAPES)
    assert adapter.record == RECORD
    assert {name: [bytes(each.data) for each in pair] for name, pair in adapter.layers.items()} == {
        name: [bytes(FACTORS[f"{name}.lora_{letter}.weight"].data) for letter in "AB"] for name in "ab"
    }
    assert bases(store, 3) == [0, 3]
    held = sum(each.num_bytes for each in [*BASE.values(), *FACTORS.values()])
    assert (loaded_bytes(store, 3), loaded_bytes(store, 0)) == (held, sum(each.num_bytes for each in BASE.values()))
    assert adapter_record(read_manifest(store, layout.weights(0)), 0) is None


def test_it_is_published_once(store):
    first = publish_adapter(store, 1, FACTORS, RECORD, {"by": 1})
    assert publish_adapter(store, 1, FACTORS, RECORD, {"by": 2}) == first
    with pytest.raises(ConflictingRecord, match=r"first to differ is 'b\.lora_B\.weight'"):
        publish_adapter(store, 1, FACTORS | {"b.lora_B.weight": block(4, 2, fill=2.0)}, RECORD, {})
    # The checkpoint is there before each return, also of one that finds the version published.
    saved = []
    publish_adapter(store, 1, FACTORS, RECORD, {}, before_manifest=lambda: saved.append(1) or {})
    assert saved == [1]


def test_of_two_that_publish_at_once_the_second_returns_what_the_first_stored_or_names_what_differs(store):
    """The first is there when the second has written its objects, and before its manifest."""
    others = FACTORS | {"b.lora_B.weight": block(4, 2, fill=2.0)}

    def published_meanwhile(version, factors):
        return lambda: {"first": publish_adapter(store, version, factors, RECORD, {"by": 1}).digest}

    with pytest.raises(ConflictingRecord, match=r"first to differ is 'b\.lora_B\.weight'"):
        publish_adapter(store, 1, FACTORS, RECORD, {"by": 2}, before_manifest=published_meanwhile(1, others))
    second = publish_adapter(store, 2, FACTORS, RECORD, {"by": 2}, before_manifest=published_meanwhile(2, FACTORS))
    assert second.metadata["by"] == 1
    assert second == read_manifest(store, layout.weights(2))


@pytest.mark.parametrize(
    ("change", "record", "message"),
    [
        ({"c.lora_A.weight": block(2, 5)}, RECORD, r"5 tensors; allowed: <layer>\.lora_A"),
        ({"norm": block(7)}, RECORD, "5 tensors"),
        ({"b.lora_A.weight": block(2, 3)}, RECORD, r"'b' in version 0 has shape \(4, 4\); its factors give \(4, 3\)"),
        ({}, replace(RECORD, rank=3), "for 'a'; allowed: F32, of rank 3"),
        ({}, replace(RECORD, transposed=("a",)), r"'a' in version 0 has shape \(3, 5\); its factors give \(5, 3\)"),
    ],
)
def test_factors_that_do_not_fit_are_refused_before_anything_is_stored(store, change, record, message):
    before = store.list("")
    with pytest.raises(ValueError, match=message):
        publish_adapter(store, 1, FACTORS | change, record, {})
    assert store.list("") == before


def test_without_version_0_nothing_is_published():
    with pytest.raises(ObjectMissing):
        publish_adapter(MemoryStore("empty"), 1, FACTORS, RECORD, {})


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"format": 2, "rank": 2}, "format 2; this version of Gleaner reads adapters of format 1"),
        ("text", "format 'text'; this version"),
        ({"format": 1, "rank": "2", "alpha": 4.0, "transposed": []}, r"adapter\.rank: .*integer"),
        ({"format": 1, "rank": 2, "alpha": 4.0, "transposed": [], "more": 1}, r"adapter\.more: "),
        ({"format": 1, "rank": 2}, r"adapter\.alpha: "),
    ],
)
def test_a_record_that_this_version_does_not_know_is_refused_by_name(store, stated, message):
    manifest = publish_adapter(store, 1, FACTORS, RECORD, {})
    with pytest.raises(CorruptObject, match=rf"weights/00000001/manifest\.json.*{message}"):
        adapter_record(replace(manifest, metadata={"adapter": stated}), 1)
    with pytest.raises(CorruptObject, match="base: value None; allowed for an adapter: 0"):
        adapter_record(replace(manifest, base=None), 1)


def test_a_manifest_whose_factors_do_not_fit_version_0_is_refused(store):
    publish_adapter(store, 1, FACTORS, RECORD, {})
    manifest, tensors = pull_version(store, 1, None, CLOCK)
    with pytest.raises(CorruptObject, match=r"weights/00000001/manifest\.json.*'a' in version 0 has shape \(5, 3\)"):
        adapter_of(manifest, 1, tensors, SHAPES | {"a.weight": (5, 3)})
    assert records.read(store, type(manifest), layout.manifest(layout.weights(1))) == manifest
