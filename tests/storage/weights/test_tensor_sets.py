import json
import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from storage.records import canonical, layout, records
from storage.records.canonical import wrap
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing, StoreUnavailable
from storage.weights import tensor_sets
from storage.weights.tensor_sets import (
    ITEM_BYTES,
    RANGE_BYTES,
    UPLOADS,
    Manifest,
    TensorBlock,
    publish,
    pull,
    read_manifest,
)

PREFIX = layout.weights(3)
MANIFEST = layout.manifest(PREFIX)


def block(dtype: str, shape: tuple[int, ...], seed: int = 0) -> TensorBlock:
    size = ITEM_BYTES[dtype] * math.prod(shape)
    return TensorBlock(dtype, shape, np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes())


def some_tensors() -> dict[str, TensorBlock]:
    return {
        "embed.weight": block("BF16", (7, 5), 1),
        "norm.weight": block("F32", (5,), 2),
        "mask": block("BOOL", (3,), 3),
        "step": block("I64", (), 4),
        "nothing": block("F32", (0, 4), 5),
        "head": block("F16", (4, 3), 6),
    }


def contents(tensors: dict[str, TensorBlock]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in tensors.items()}


def objects_of(store: MemoryStore) -> list[str]:
    return [key for key in store.list(PREFIX) if key != MANIFEST]


@pytest.mark.parametrize("object_bytes_max", [1, 50, 1 << 30])
def test_what_was_published_is_pulled(object_bytes_max):
    store = MemoryStore()
    published = publish(store, PREFIX, some_tensors(), {"step": 3, "name": "Grüße"}, object_bytes_max)
    manifest, tensors = pull(store, PREFIX)
    assert manifest == published == read_manifest(store, PREFIX)
    assert manifest.metadata == {"step": 3, "name": "Grüße"}
    assert contents(tensors) == contents(some_tensors())


def test_tensors_are_split_and_a_larger_one_is_alone():
    store = MemoryStore()
    tensors = {name: block("U8", (size,), size) for name, size in (("a", 40), ("b", 60), ("c", 250), ("d", 10))}
    manifest = publish(store, PREFIX, tensors, {}, object_bytes_max=100)
    place = {name: entry.object for name, entry in manifest.tensors.items()}
    assert place["a"] == place["b"]
    assert len(set(place.values())) == len(manifest.objects) == len(objects_of(store)) == 3
    for name, entry in manifest.objects.items():
        assert len(store.get(layout.tensor_object(PREFIX, name))) == entry.bytes


def test_objects_larger_than_a_range(tmp_path):
    store = LocalStore(tmp_path, fsync=False)
    tensors = {"big": block("BF16", (RANGE_BYTES + 1001,)), "small": block("F32", (3,), 1)}
    publish(store, PREFIX, tensors, {})
    assert contents(pull(store, PREFIX)[1]) == contents(tensors)


def test_an_empty_set():
    store = MemoryStore()
    manifest = publish(store, PREFIX, {}, {"why": "not"})
    assert pull(store, PREFIX) == (manifest, {})
    assert objects_of(store) == []


@pytest.mark.slow
def test_the_s3_store_gives_the_same(s3_url):
    from storage.stores.connect import connect  # noqa: PLC0415 - the rest of the file needs no server

    store = connect(f"{s3_url}/weights")
    tensors = some_tensors() | {"big": block("BF16", (RANGE_BYTES // 2 + 7,))}
    assert publish(store, PREFIX, tensors, {}) == publish(MemoryStore(), PREFIX, tensors, {})
    assert contents(pull(store, PREFIX)[1]) == contents(tensors)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)
blocks = st.builds(
    block,
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.integers(0, 99),
)


@pytest.mark.slow
@given(tensors=st.dictionaries(names, blocks, max_size=8), object_bytes_max=st.integers(1, 400))
def test_any_set_round_trips(tensors, object_bytes_max):
    store = MemoryStore()
    manifest = publish(store, PREFIX, tensors, {}, object_bytes_max)
    assert contents(pull(store, PREFIX)[1]) == contents(tensors)
    for name in manifest.objects:
        stored = dict(safetensors.deserialize(store.get(layout.tensor_object(PREFIX, name))))
        for tensor, entry in stored.items():
            assert (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) == contents(tensors)[tensor]


def test_safetensors_own_readers_read_our_objects(tmp_path):
    store = LocalStore(tmp_path, fsync=False)
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    step = np.array(7, dtype=np.int64)
    tensors = {"w": TensorBlock("F32", (3, 4), weight.data), "step": TensorBlock("I64", (), step.data)}
    manifest = publish(store, PREFIX, tensors, {})
    path = tmp_path / layout.tensor_object(PREFIX, next(iter(manifest.objects)))
    loaded = safetensors.numpy.load_file(path)
    assert np.array_equal(loaded["w"], weight)
    assert loaded["step"] == step
    with safetensors.safe_open(path, framework="np") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert sorted(opened.keys()) == ["step", "w"]


def test_tensors_lie_at_multiples_of_their_element_size():
    store = MemoryStore()
    tensors = {"a": block("U8", (3,)), "b": block("F32", (3,)), "c": block("BF16", (1,)), "d": block("I64", (1,))}
    manifest = publish(store, PREFIX, tensors, {})
    body = store.get(layout.tensor_object(PREFIX, next(iter(manifest.objects))))
    start = 8 + int.from_bytes(body[:8], "little")
    assert start % 8 == 0
    header = json.loads(body[8:start])
    assert all(header[name]["data_offsets"][0] % ITEM_BYTES[tensors[name].dtype] == 0 for name in tensors)


def test_nothing_is_published_until_the_manifest_is_there():
    class DyingStore(MemoryStore):
        def create(self, key: str, body: bytes) -> bool:
            if key == MANIFEST:
                raise KeyboardInterrupt
            return super().create(key, body)

    store = DyingStore()
    with pytest.raises(KeyboardInterrupt):
        publish(store, PREFIX, some_tensors(), {}, object_bytes_max=50)
    assert len(objects_of(store)) > 1
    for read in (read_manifest, pull):
        with pytest.raises(ObjectMissing, match=MANIFEST):
            read(store, PREFIX)
    successor = MemoryStore()
    for key in store.list(""):
        successor.put(key, store.get(key))
    publish(successor, PREFIX, some_tensors(), {}, object_bytes_max=50)
    assert contents(pull(successor, PREFIX)[1]) == contents(some_tensors())
    assert objects_of(successor) == objects_of(store)


def test_publishing_the_same_again_returns_what_is_stored_and_writes_nothing():
    store = MemoryStore()
    first = publish(store, PREFIX, some_tensors(), {"by": "the first"})
    keys = store.list("")
    assert publish(store, PREFIX, some_tensors(), {"by": "the second"}, object_bytes_max=1) == first
    assert store.list("") == keys


@pytest.mark.parametrize(
    "other",
    [
        some_tensors() | {"head": block("F16", (4, 3), 99)},
        some_tensors() | {"head": block("F16", (3, 4), 6)},
        some_tensors() | {"head": block("BF16", (4, 3), 6)},
        {name: tensor for name, tensor in some_tensors().items() if name != "head"},
    ],
    ids=["other bytes", "other shape", "other dtype", "missing"],
)
def test_publishing_something_else_is_a_conflict(other):
    for first, second in ((some_tensors(), other), (other, some_tensors())):
        store = MemoryStore("run")
        publish(store, PREFIX, first, {})
        with pytest.raises(ConflictingRecord, match=rf"memory://run/{MANIFEST}.*'head'"):
            publish(store, PREFIX, second, {})
        assert contents(pull(store, PREFIX)[1]) == contents(first)


def test_of_two_publishers_at_once_the_first_manifest_counts():
    class Overtaken(MemoryStore):
        def create(self, key: str, body: bytes) -> bool:
            if key == MANIFEST:
                records.put(self, key, publish(MemoryStore(), PREFIX, some_tensors(), {"by": "another"}))
            return super().create(key, body)

    assert publish(Overtaken(), PREFIX, some_tensors(), {"by": "us"}).metadata == {"by": "another"}
    with pytest.raises(ConflictingRecord):
        publish(Overtaken(), PREFIX, some_tensors() | {"head": block("F16", (4, 3), 99)}, {})


class Uploads(MemoryStore):
    """Whose creates of objects answer once two are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.two = threading.Event()
        self.lock = threading.Lock()
        self.now = self.most = 0

    def create(self, key: str, body: bytes) -> bool:
        if key == MANIFEST:
            assert self.now == 0
            assert len(objects_of(self)) == 6
            return super().create(key, body)
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        if self.now >= 2:
            self.two.set()
        assert self.two.wait(300)
        created = super().create(key, body)
        with self.lock:
            self.now -= 1
        return created


def test_objects_are_written_side_by_side_a_few_at_a_time_and_the_manifest_after_them():
    store = Uploads()
    publish(store, PREFIX, {f"{seed}": block("U8", (9,), seed) for seed in range(6)}, {}, object_bytes_max=1)
    assert 2 <= store.most <= UPLOADS < 6
    assert len(pull(store, PREFIX)[1]) == 6


def test_lost_answers_change_nothing():
    class Lossy(MemoryStore):
        def create(self, key: str, body: bytes) -> bool:
            super().create(key, body)
            raise StoreUnavailable("no answer")

    store = Lossy()
    publish(store, PREFIX, some_tensors(), {})
    assert contents(pull(store, PREFIX)[1]) == contents(some_tensors())


@pytest.mark.slow
@given(data=st.data())
def test_no_changed_byte_goes_unnoticed(data):
    store = MemoryStore()
    publish(store, PREFIX, some_tensors(), {"step": 3}, object_bytes_max=60)
    key = data.draw(st.sampled_from(store.list("")))
    body = bytearray(store.get(key))
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] ^= data.draw(st.integers(1, 255))
    store.put(key, bytes(body))
    with pytest.raises(CorruptObject) as caught:
        pull(store, PREFIX)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "change", [lambda body: body[:-1], lambda body: body + b"x", lambda body: body[:5], lambda _: b""]
)
def test_a_truncated_or_longer_object_is_named(change):
    store = MemoryStore()
    publish(store, PREFIX, some_tensors(), {})
    [key] = objects_of(store)
    store.put(key, change(store.get(key)))
    with pytest.raises(CorruptObject, match="bytes long") as caught:
        pull(store, PREFIX)
    assert caught.value.key == key


def test_a_corrupt_tensor_is_named():
    store = MemoryStore()
    publish(store, PREFIX, some_tensors(), {})
    [key] = objects_of(store)
    body = store.get(key)
    store.put(key, body.replace(bytes(some_tensors()["head"].data), b"\0" * 24))
    with pytest.raises(CorruptObject, match=r"\.safetensors.*tensor 'head'"):
        pull(store, PREFIX)


def test_an_object_under_the_name_of_another_is_noticed_by_the_publisher():
    store = MemoryStore()
    manifest = publish(MemoryStore(), PREFIX, some_tensors(), {})
    store.put(layout.tensor_object(PREFIX, next(iter(manifest.objects))), b"torn")
    with pytest.raises(CorruptObject, match="other bytes than its name says"):
        publish(store, PREFIX, some_tensors(), {})


def damaged(manifest: Manifest) -> dict[str, bytes]:
    """Manifests that must not be used, by what is wrong with them."""
    text = json.loads(canonical.encode(manifest))
    name = next(iter(text["tensors"]))

    def changed(**fields: object) -> bytes:
        return wrap(MANIFEST, "manifest", json.dumps(text | fields).encode())

    def tensor(**fields: object) -> bytes:
        return changed(tensors=text["tensors"] | {name: text["tensors"][name] | fields})

    return {
        "format 2": records.encode(MANIFEST, manifest).replace(b'"format":1', b'"format":2'),
        "extra": changed(extra=1),
        "digest": records.encode(MANIFEST, manifest).replace(b'"base":null', b'"base":1000'),
        "no object": changed(objects={}),
        "32 hexadecimal": changed(tensors={}, objects={"../x": next(iter(text["objects"].values()))}),
        "dtype": tensor(dtype="F31"),
        "shape": tensor(shape=[-1]),
        "encoding": tensor(encoding="delta"),
        "truncated": records.encode(MANIFEST, manifest)[:-10],
        "elsewhere": records.encode("elsewhere/manifest.json", manifest),
    }


def test_a_damaged_manifest_is_named_and_never_used():
    store = MemoryStore()
    for what, body in damaged(publish(store, PREFIX, some_tensors(), {})).items():
        store.put(MANIFEST, body)
        for read in (read_manifest, pull):
            with pytest.raises(CorruptObject, match=what) as caught:
                read(store, PREFIX)
            assert caught.value.key == MANIFEST


def test_a_manifest_that_misplaces_a_tensor_is_refused():
    store = MemoryStore()
    manifest = publish(store, PREFIX, some_tensors(), {}, object_bytes_max=1)
    first, second = list(manifest.tensors)[:2]
    swapped = replace(manifest.tensors[first], object=manifest.tensors[second].object)
    records.put(store, MANIFEST, replace(manifest, tensors=manifest.tensors | {first: swapped}))
    with pytest.raises(CorruptObject, match="header"):
        pull(store, PREFIX)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorBlock("float32", (1,), b"0000"), "dtype: value 'float32'; allowed: C64"),
        (lambda: TensorBlock("F32", (2,), b"0000"), r"data: 4 bytes; F32 of shape \(2,\) takes 8"),
        (lambda: TensorBlock("F32", (-1,), b""), "shape"),
        (lambda: TensorBlock("U8", (2,), memoryview(b"0123")[::2]), "contiguous"),
    ],
)
def test_blocks_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"__metadata__": block("U8", (1,))}, {}, "tensor name"),
        ({}, {"when": object()}, "metadata: .*not JSON serializable"),
        ({}, {"name": "\ud800"}, "metadata"),
        ({"\ud800": block("U8", (1,))}, {}, "surrogates"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tensors, metadata, message):
    store = MemoryStore()
    with pytest.raises(ValueError, match=message):
        publish(store, PREFIX, tensors, metadata)
    assert store.list("") == []


def test_metadata_is_returned_as_it_will_be_read():
    store = MemoryStore()
    published = publish(store, PREFIX, {}, {"shape": (1, 2), "by": {10: "a", 9: "b"}, "worst": float("inf")})
    assert published.metadata == {"shape": [1, 2], "by": {"10": "a", "9": "b"}, "worst": float("inf")}
    assert read_manifest(store, PREFIX) == published


@pytest.mark.parametrize("object_bytes_max", [1, 30, 1000])
def test_objects_and_manifest_written_apart_are_what_publish_writes(object_bytes_max):
    tensors = {f"t{n}": tensor_sets.TensorBlock("U8", (n,), bytes(range(n))) for n in range(1, 20)}
    whole, apart = MemoryStore(), MemoryStore()
    published = tensor_sets.publish(whole, "set/", tensors, {"a": 1}, object_bytes_max)
    groups = tensor_sets.objects_of({name: block.num_bytes for name, block in tensors.items()}, object_bytes_max)
    parts = [tensor_sets.write_object(apart, "set/", {name: tensors[name] for name in group}) for group in groups]
    assert not any(key.endswith("manifest.json") for key in apart.list(""))
    assert tensor_sets.write_manifest(apart, "set/", parts, {"a": 1}) == published
    assert {key: apart.get(key) for key in apart.list("")} == {key: whole.get(key) for key in whole.list("")}
    assert tensor_sets.write_manifest(apart, "set/", parts, {"a": 2}) == published
    other = tensor_sets.write_object(apart, "set/", {"t1": tensor_sets.TensorBlock("U8", (1,), b"x")}, upload=False)
    with pytest.raises(ConflictingRecord, match="other tensors are already published there; the first to differ"):
        tensor_sets.write_manifest(apart, "set/", [other], {"a": 1})
