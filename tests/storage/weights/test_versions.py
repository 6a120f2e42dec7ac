from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.clock import ManualClock
from storage.records import layout, records
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing
from storage.weights.tensor_sets import publish, pull, read_manifest
from storage.weights.versions import bases, publish_version, pull_version
from tests.weight_chains import Counting, block, cache_at, chain, contents, everything, first, pulled, stepped


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


@pytest.mark.slow
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


def test_a_version_that_is_not_published_is_missing_by_name():
    with pytest.raises(ObjectMissing, match=r"weights/00000000/manifest\.json"):
        pull_version(MemoryStore("run"), 0, None, ManualClock())


def test_differences_do_not_add_up_to_more_than_a_version():
    """Also long before the interval says so; and who holds the version before still reads differences only."""
    store = MemoryStore("run")
    versions = chain(store, 12, full_interval=100, share=0.5, far=True)
    manifests = [read_manifest(store, layout.weights(version)) for version in range(13)]
    changed_bytes, size = 0, manifests[0].num_bytes
    for version, manifest in enumerate(manifests):
        changed_bytes += sum(entry.stored_bytes or 0 for entry in manifest.tensors.values())
        changed_bytes *= manifest.base is not None
        assert changed_bytes <= size
        is_whole = version > 0 and manifest.base is None
        assert (layout.delta_manifest(layout.weights(version)) in store.list("")) == is_whole
        assert pulled(store, version) == contents(versions[version])
    assert 2 <= sum(manifest.base is None for manifest in manifests) <= 7


@pytest.mark.slow
@given(data=st.data())
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
    records.put(store, layout.manifest(prefix), forged)


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
