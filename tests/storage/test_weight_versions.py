import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import layout, records
from storage.clock import ManualClock
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.store import ConflictingRecord, CorruptObject, ObjectMissing
from storage.weight_cache import WeightCache
from storage.weight_manifest import ITEM_BYTES, TensorBlock, sealed
from storage.weight_versions import bases, publish_version, pull_version
from storage.weights import publish, pull, read_manifest

V1 = Path(__file__).parents[1] / "data" / "v1"
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


def test_every_version_is_pulled_as_it_was_published():
    store = MemoryStore("run")
    versions = chain(store, 9)
    for version, tensors in enumerate(versions):
        assert pulled(store, version) == contents(tensors), version


def test_what_a_version_consists_of():
    store = MemoryStore()
    chain(store, 4)
    manifests = [read_manifest(store, layout.weights(version)) for version in range(5)]
    encodings = {name: entry.encoding for name, entry in manifests[1].tensors.items()}
    assert encodings == {"embed": "diff-zstd", "frozen": "same", "norm": "diff-zstd", "nothing": "same"}
    assert [manifest.base for manifest in manifests] == [None, 0, 1, 2, None]
    assert {entry.encoding for entry in manifests[4].tensors.values()} == {"full"}
    assert {name: entry.version for name, entry in manifests[4].tensors.items()} == {
        "embed": None,
        "frozen": 0,
        "norm": None,
        "nothing": 0,
    }
    sizes = [sum(len(store.get(key)) for key in store.list(layout.weights(version))) for version in (0, 1)]
    assert sizes[1] < 0.5 * sizes[0]
    assert layout.delta_manifest(layout.weights(4)) in store.list("")


def test_bases_are_all_that_a_reader_needs():
    store = MemoryStore("run")
    versions = chain(store, 10)
    assert [bases(store, version) for version in (0, 3, 4, 7, 10)] == [
        [0],
        [0, 1, 2, 3],
        [0, 4],
        [0, 4, 5, 6, 7],
        [0, 8, 9, 10],
    ]
    for version, tensors in enumerate(versions):
        needed = tuple(layout.weights(each) for each in bases(store, version))
        kept = Counting({key: body for key, body in everything(store).items() if key.startswith(needed)})
        assert pulled(kept, version) == contents(tensors)


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


def test_tensors_that_changed_completely_or_in_kind_are_sent_whole():
    store = MemoryStore("run")
    publish(store, layout.weights(0), first(), {})
    new = first() | {
        "embed": block("BF16", (64, 32), 9),
        "norm": block("BF16", (512,), 9),
        "more": block("I8", (9,), 9),
    }
    del new["frozen"]
    manifest = publish_version(store, 1, new, {}, base=first(), full_interval=10)
    assert manifest.base == 0
    assert {name for name, entry in manifest.tensors.items() if entry.encoding != "full"} == {"nothing"}
    assert pulled(store, 1) == contents(new)


def test_a_base_that_was_not_published_costs_bytes_and_no_truth():
    store = MemoryStore("run")
    publish(store, layout.weights(0), first(), {})
    new = stepped(first(), 1)
    lie = first() | {"embed": block("BF16", (64, 32), 77)}
    manifest = publish_version(store, 1, new, {}, base=lie, full_interval=10)
    assert manifest.tensors["embed"].encoding == "full"
    assert pulled(store, 1) == contents(new)


def test_publishing_again_returns_what_is_stored_and_other_tensors_are_a_conflict():
    store = MemoryStore("run")
    versions = chain(store, 4)
    for version in (3, 4):
        keys = store.list("")
        again = publish_version(store, version, versions[version], {}, base={}, full_interval=1)
        assert again == read_manifest(store, layout.weights(version))
        assert store.list("") == keys
        with pytest.raises(ConflictingRecord, match="'embed'"):
            publish_version(store, version, stepped(versions[version], 99), {}, base={}, full_interval=1)


class Killed(BaseException):
    pass


class DiesAtWrite(MemoryStore):
    def __init__(self, objects: dict[str, bytes], writes: int) -> None:
        super().__init__("run")
        self._objects.update(objects)
        self.left = writes

    def create(self, key: str, body: bytes) -> bool:
        if not self.left:
            raise Killed
        self.left -= 1
        return super().create(key, body)


@pytest.mark.parametrize("other_successor", [False, True])
@pytest.mark.parametrize("last", [3, 4])
def test_killed_at_any_write_nothing_is_there_and_a_successor_completes_it(tmp_path, last, other_successor):
    """Also one whose tensors are others, as a trainer's are whose state was not saved."""
    store = MemoryStore("run")
    versions = chain(store, last - 1)
    before = everything(store)
    new = stepped(versions[-1], last)
    theirs = stepped(versions[-1], 55) if other_successor else new
    for writes in range(10):
        dying = DiesAtWrite(before, writes)
        try:
            publish_version(dying, last, new, {}, base=versions[-1], full_interval=4)
            break
        except Killed:
            pass
        with pytest.raises(ObjectMissing, match=layout.manifest(layout.weights(last))):
            pulled(dying, last)
        dying.left = 99
        publish_version(dying, last, theirs, {}, base=versions[-1], full_interval=4)
        assert pulled(dying, last) == contents(theirs)
        cache = cache_at(tmp_path / f"{writes}")
        pulled(dying, last - 1, cache)
        assert pulled(dying, last, cache) == contents(theirs)
        publish_version(dying, last + 1, stepped(theirs, 77), {}, base=theirs, full_interval=4)
        assert pulled(dying, last + 1, cache) == contents(stepped(theirs, 77))
    assert writes >= 2


def test_of_two_publishers_at_once_the_first_manifest_counts():
    versions = chain(MemoryStore("run"), 4)

    class Overtaken(MemoryStore):
        overtaken = False

        def create(self, key: str, body: bytes) -> bool:
            if key == layout.manifest(layout.weights(4)) and not self.overtaken:
                self.overtaken = True
                publish_version(self, 4, versions[4], {"by": "them"}, base=versions[3], full_interval=4)
            return super().create(key, body)

    store = Overtaken("run")
    chain(store, 3)
    assert publish_version(store, 4, versions[4], {"by": "us"}, base=versions[3], full_interval=4).metadata == {
        "by": "them"
    }


def test_a_version_is_waited_for_and_then_missing_by_name():
    class LateStore(MemoryStore):
        def __init__(self, clock: ManualClock, at_s: float) -> None:
            super().__init__("run")
            self.clock, self.at_s = clock, at_s

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if self.clock.monotonic() < self.at_s:
                raise ObjectMissing(key)
            return super().get(key, start, end)

    clock = ManualClock()
    store = LateStore(clock, at_s=3.0)
    publish(MemoryStore(), layout.weights(0), first(), {})
    store.put("x", b"x")
    with pytest.raises(ObjectMissing, match=r"weights/00000000/manifest\.json"):
        pull_version(store, 0, None, clock, wait_s=2.0)
    assert 2.0 <= clock.monotonic() < 3.0
    clock.advance(10)
    publish(store, layout.weights(0), first(), {})
    store.at_s = clock.monotonic() + 5
    assert contents(pull_version(store, 0, None, clock, wait_s=60.0)[1]) == contents(first())
    assert store.at_s <= clock.monotonic() < store.at_s + 2


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_no_changed_byte_goes_unnoticed(data):
    store = MemoryStore("run")
    chain(store, 6)
    counting = Counting(everything(store))
    expected = pulled(counting, 6)
    key = data.draw(st.sampled_from(sorted(set(counting.read))))
    body = bytearray(store.get(key))
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] ^= data.draw(st.integers(1, 255))
    store.put(key, bytes(body))
    try:
        # A byte of a header, or of a tensor, that was not needed.
        assert pulled(store, 6) == expected
    except CorruptObject as error:
        assert error.key == key  # noqa: PT017 - both outcomes are right


def forge(store: MemoryStore, version: int, **changes: object) -> None:
    prefix = layout.weights(version)
    forged = replace(read_manifest(store, prefix), **changes)
    store.put(layout.manifest(prefix), records.encode(sealed(replace(forged, digest=""))))


def test_a_difference_that_leads_elsewhere_is_named():
    store = MemoryStore("run")
    chain(store, 2)
    manifest = read_manifest(store, layout.weights(2))
    other = replace(manifest.tensors["embed"], digest="0" * 32)
    forge(store, 2, tensors=manifest.tensors | {"embed": other})
    with pytest.raises(CorruptObject, match=r"00000002/manifest.*'embed'.*do not lead to the digest 0000"):
        pulled(store, 2)


def test_versions_that_refer_to_what_is_not_there_are_named():
    store = MemoryStore("run")
    chain(store, 4)
    forge(store, 3, base=7)
    with pytest.raises(CorruptObject, match="base: value 7; allowed: 0 to 2"):
        pulled(store, 3)
    manifest = read_manifest(store, layout.weights(4))
    forge(store, 4, tensors=manifest.tensors | {"frozen": replace(manifest.tensors["frozen"], version=2)})
    with pytest.raises(CorruptObject, match="'frozen' is not what version 2 stores"):
        pulled(store, 4)
    forge(store, 0, tensors={k: v for k, v in read_manifest(store, layout.weights(0)).tensors.items() if k != "embed"})
    with pytest.raises(CorruptObject, match=r"00000000/manifest.*no tensor 'embed'"):
        pulled(store, 2)


def test_differences_are_not_pulled_as_a_set():
    store = MemoryStore("run")
    chain(store, 4)
    for version in (1, 4):
        with pytest.raises(ValueError, match="use pull_version"):
            pull(store, layout.weights(version))


def test_manifests_of_before_digests_were_named_are_read_and_continued():
    """Written by an earlier release: BLAKE2b throughout, and no field of a difference."""
    old = LocalStore(V1 / "weights", fsync=False)
    assert "digest_algorithm" not in json.loads(old.get(layout.manifest(layout.weights(3))))
    manifest, tensors = pull(old, layout.weights(3))
    assert manifest.digest_algorithm == "blake2b"
    assert np.frombuffer(tensors["norm.weight"].data, np.float32).tolist() == [0, 1, 2, 3]
    store = MemoryStore("run")
    for key in old.list(""):
        store.put(key, old.get(key))
    assert publish(store, layout.weights(3), tensors, {}) == manifest
    new = tensors | {
        "norm.weight": replace(tensors["norm.weight"], data=b"\1" + bytes(tensors["norm.weight"].data)[1:])
    }
    published = publish_version(store, 4, new, {}, base=tensors, full_interval=10)
    assert (published.digest_algorithm, published.tensors["embed.weight"].encoding) == ("blake3", "same")
    assert pulled(store, 4) == contents(new)
