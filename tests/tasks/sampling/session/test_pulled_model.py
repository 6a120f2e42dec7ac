import numpy as np

from storage.clock import ManualClock
from storage.stores.memory import MemoryStore
from tasks.sampling.engines.patched_weights import PatchedWeights
from tasks.sampling.session.pulled_model import pull_model
from tests.weight_chains import cache_at, chain, contents

KINDS = {"U8": np.uint8, "I32": np.int32, "BF16": np.uint16, "F32": np.uint32}


def numbers(block):
    return np.frombuffer(block.data, KINDS[block.dtype])


def test_what_changes_is_given_for_the_version_that_an_engine_holds(tmp_path):
    store, cache = MemoryStore(), cache_at(tmp_path / "cache")
    versions = chain(store, 2)
    assert not isinstance(pull_model(store, 1, cache, ManualClock())[1], PatchedWeights)
    assert not isinstance(pull_model(store, 1, cache, ManualClock(), held=1)[1], PatchedWeights)
    _, pulled = pull_model(store, 2, cache, ManualClock(), held=1)
    assert isinstance(pulled, PatchedWeights)
    assert (pulled.base, contents(pulled)) == (1, contents(versions[2]))
    patches = pulled.patches()
    assert set(patches) == {"embed", "norm"}
    for name, patch in patches.items():
        found = numbers(versions[1][name]).copy()
        at = numbers(patch.indices)
        assert patch.shape == versions[1][name].shape
        assert 0 < len(at) < len(found) / 10
        found[at] = numbers(patch.values)
        assert np.array_equal(found, numbers(versions[2][name]))


def test_without_a_cache_it_is_not_known_what_changes(tmp_path):
    store = MemoryStore()
    versions = chain(store, 2)
    _, pulled = pull_model(store, 2, None, ManualClock(), held=1)
    assert contents(pulled) == contents(versions[2])
    places = pulled.patches()
    assert places is None or set(places) == {"embed", "norm"}
