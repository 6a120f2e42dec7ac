"""Before an iteration is planned: what its training restores from is stored whole, as far as can be seen cheaply."""

import functools

import pytest

from storage.clock import ManualClock
from storage.records import layout
from storage.records.run import acquire_lease
from storage.stores.store import CorruptObject
from tasks.preparing.iteration import prepare
from tests.small_run import commit_iteration, config, everything, memory_store, roll_out, train_small

URL = "memory://needed-state"
CRITIC = {"algorithm": {"advantage_estimator": "gae"}}
PENALTY = {"algorithm": {"kl_coef": 0.1}}
LORA = {"lora": {"rank": 2}}
# Of each kind of state the configuration that needs it, and the prefix of its tensors.
NEEDS = {
    "checkpoint": ({}, layout.checkpoint(1)),
    "critic": (CRITIC, layout.critic_checkpoint(1)),
    "reference": (PENALTY, layout.weights(0)),
    "adapted": (LORA, layout.weights(0)),
}


def after_one_iteration(model, **sections):
    store = memory_store("needed-state")
    settings = config(URL, model, **sections)
    prepare(settings, "e1", ManualClock())
    roll_out(URL, 0)
    train_small(URL, 0)
    commit_iteration(URL, 0)
    return store, settings


@functools.cache
def one_iteration(model, name):
    """The objects of a run with one iteration, and its configuration."""
    store, settings = after_one_iteration(model, **NEEDS[name][0])
    return everything(store), settings


def shorten(store, key):
    store.put(key, store.get(key)[:-1])


def lengthen(store, key):
    store.put(key, store.get(key) + b"x")


def flip(store, key):
    body = bytearray(store.get(key))
    body[-1] ^= 1
    store.put(key, bytes(body))


def remove(store, key):
    store.delete(key)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [shorten, lengthen, flip, remove])
@pytest.mark.parametrize("name", NEEDS)
def test_nothing_is_planned_if_training_could_not_restore_its_state(model, name, damage):
    objects, settings = one_iteration(model, name)
    store = memory_store("needed-state")
    for key, body in objects.items():
        store.put(key, body)
    key = next(key for key in store.list(NEEDS[name][1]) if key.endswith(".safetensors"))
    damage(store, key)
    before = everything(store)
    with pytest.raises(CorruptObject, match=f"^object '{key}' is corrupt: ") as caught:
        prepare(settings, "e1", ManualClock())
    assert "\n" not in str(caught.value)
    assert not [new for new in everything(store).keys() - before.keys() if not new.startswith(layout.LEASE)]
    acquire_lease(store, "whoever is next", 1e9, ManualClock())  # at once: it was given back


@pytest.mark.slow
def test_a_manifest_is_looked_at_too_and_an_iteration_that_is_trained_needs_nothing(model):
    store, settings = after_one_iteration(model)
    manifest = layout.manifest(layout.checkpoint(1))
    body = store.get(manifest)
    flip(store, manifest)
    with pytest.raises(CorruptObject, match=manifest):
        prepare(settings, "e1", ManualClock())
    store.delete(manifest)
    # Without it, the first iteration is trained again from what is recorded.
    batch = layout.batch(0, 0)
    recorded = store.get(batch)
    store.delete(batch)
    with pytest.raises(CorruptObject, match=f"{batch}.*it is missing, and iteration 0 must be replayed"):
        prepare(settings, "e1", ManualClock())
    store.put(batch, recorded)
    store.put(manifest, body)
    assert prepare(settings, "e1", ManualClock())[0].iteration == 1
    roll_out(URL, 1)
    train_small(URL, 1)
    store.delete(manifest)
    assert prepare(settings, "e1", ManualClock())[0].iteration == 1
    # Only with its weights: a checkpoint alone, as an older version may have left it, is made again.
    store.delete(layout.manifest(layout.weights(2)))
    store.delete(batch)
    with pytest.raises(CorruptObject, match=f"{batch}.*it is missing, and iteration 0 must be replayed"):
        prepare(settings, "e1", ManualClock())
