"""The changed elements of a version: what a pull notes, what is compared, and when they cannot be known."""

from dataclasses import replace

import numpy as np
import pytest

from storage.clock import ManualClock
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.weights import deltas
from storage.weights.changes import Changes
from storage.weights.manifest import ITEM_BYTES
from storage.weights.tensor_sets import digest_all, draft_set, publish, read_manifest
from storage.weights.versions import _differences, publish_version, pull_version
from tests.weight_chains import block, cache_at, chain, contents, everything, first, stepped


def places_of(store, version, since, cache):
    """What changes from `since`, after a pull of `version`."""
    changes = Changes(since)
    manifest, tensors = pull_version(store, version, cache, ManualClock(), changes=changes)
    return changes.places(store, version, manifest, tensors, cache)


def patched(before, after, places):
    """`before` with the named elements of `after`."""
    found = contents(before)
    for name, at in places.items():
        dtype, shape, data = found[name]
        assert np.all(np.diff(at) > 0)
        old, new = (
            np.frombuffer(bytearray(data), f"<u{ITEM_BYTES[dtype]}"),
            np.frombuffer(after[name].data, f"<u{ITEM_BYTES[dtype]}"),
        )
        old[at] = new[at]
        found[name] = (dtype, shape, old.tobytes())
    return found


@pytest.fixture(scope="module")
def published():
    store = MemoryStore()
    return store, chain(store, 6)


@pytest.mark.parametrize("since", range(7))
@pytest.mark.parametrize("version", range(7))
def test_the_changed_elements_lead_from_any_held_version_to_any_other(published, tmp_path, since, version):
    store, versions = published
    cache = cache_at(tmp_path / "cache")
    pull_version(store, since, cache, ManualClock())
    places = places_of(store, version, since, cache)
    assert patched(versions[since], versions[version], places) == contents(versions[version])
    assert "frozen" not in places
    share = sum(map(len, places.values())) / sum(b.num_bytes // 2 for b in versions[0].values())
    assert share < 0.05 * max(1, abs(since - version))


def test_differences_that_a_pull_follows_are_noted_and_nothing_is_compared(published, tmp_path):
    store, versions = published
    cache = cache_at(tmp_path / "cache")
    pull_version(store, 1, cache, ManualClock())
    changes = Changes(1)
    manifest, tensors = pull_version(store, 2, cache, ManualClock(), changes=changes)
    places = changes.places(store, 2, manifest, tensors, None)
    assert patched(versions[1], versions[2], places) == contents(versions[2])


def test_a_way_that_starts_behind_the_held_version_is_not_taken_for_the_whole_difference(published, tmp_path):
    """The engine holds version 1, and the machine version 2: the pull of 3 follows one difference of two."""
    store, versions = published
    cache = cache_at(tmp_path / "cache")
    pull_version(store, 2, cache, ManualClock())
    assert places_of(store, 3, 1, cache) is None
    pull_version(store, 1, cache, ManualClock())
    assert patched(versions[1], versions[3], places_of(store, 3, 1, cache)) == contents(versions[3])


def test_a_tensor_that_the_machine_holds_newer_than_the_engine_is_compared_with_the_engines(published, tmp_path):
    """The pull walks back to version 1 for one tensor, and starts at version 2 with the other."""
    store, versions = published
    cache = cache_at(tmp_path / "cache")
    pull_version(store, 1, cache, ManualClock())
    pull_version(store, 2, cache, ManualClock(), names=["norm"])
    assert patched(versions[1], versions[3], places_of(store, 3, 1, cache)) == contents(versions[3])


def test_a_version_beside_the_chain_is_compared(tmp_path):
    """Version 2 follows from version 0, and the engine holds version 1, which does, too."""
    store, cache = MemoryStore(), cache_at(tmp_path / "cache")
    first_, second = chain(store, 1)
    third = stepped(first_, 2)
    drafts = _differences(third, digest_all(third), read_manifest(store, layout.weights(0)), first_)
    prefix = layout.weights(2)
    draft_set(drafts, {}, base=0).write(store, prefix, layout.manifest(prefix))
    pull_version(store, 0, cache, ManualClock())
    assert places_of(store, 2, 1, cache) is None
    pull_version(store, 1, cache, ManualClock())
    assert patched(second, third, places_of(store, 2, 1, cache)) == contents(third)


@pytest.mark.parametrize("way", ["noted", "compared"])
def test_changes_that_would_take_more_memory_than_half_a_version_are_given_up(tmp_path, way):
    """Each float32 number changes in a step: indices and values would take twice the bytes of the version."""
    store, cache = MemoryStore(), cache_at(tmp_path / "cache")
    before = {str(seed): block("F32", (512,), seed) for seed in range(4)}
    after = {name: replace(each, data=(np.frombuffer(each.data, "<u4") ^ 1).tobytes()) for name, each in before.items()}
    publish(store, layout.weights(0), before, {})
    publish_version(store, 1, after, {}, base=before, full_interval=100)
    pull_version(store, 0, cache, ManualClock())
    changes = Changes(0)
    manifest, tensors = pull_version(store, 1, cache, ManualClock(), changes=changes if way == "noted" else None)
    assert (changes.are_too_many, changes._noted) == (way == "noted", {})
    assert changes.places(store, 1, manifest, tensors, cache) is None


def test_without_the_held_version_nothing_is_known(published, tmp_path):
    store, _ = published
    assert places_of(store, 5, 3, None) is None
    gone = MemoryStore()
    gone._objects.update({key: data for key, data in everything(store).items() if layout.weights(3) not in key})
    assert places_of(gone, 5, 3, cache_at(tmp_path / "cache")) is None


def test_tensors_of_other_shapes_are_no_changes(tmp_path):
    store, cache = MemoryStore(), cache_at(tmp_path / "cache")
    publish(store, layout.weights(0), first(), {})
    publish(store, layout.weights(1), {name: block for name, block in first().items() if name != "norm"}, {})
    pull_version(store, 0, cache, ManualClock())
    assert places_of(store, 1, 0, cache) is None


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5])
def test_the_elements_that_a_difference_changes_are_those_that_differ(item_bytes, share):
    rng = np.random.default_rng(item_bytes)
    base = rng.integers(0, 256, (deltas.CHUNK + 7) * item_bytes, dtype=np.uint8).view(f"<u{item_bytes}")
    new = base ^ (rng.random(len(base)) < share).astype(base.dtype)
    noted: list[deltas.Indices] = []
    data = base.copy()
    deltas.apply(deltas.encode(base.data, new.data, item_bytes), data.data, item_bytes, noted)
    assert np.array_equal(data, new)
    wanted = np.flatnonzero(base != new)
    assert np.array_equal(np.concatenate([np.zeros(0, np.int64), *noted]), wanted)
    assert np.array_equal(deltas.places(base.data, new.data, item_bytes), wanted)
