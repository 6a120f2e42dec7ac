"""Retention of a run that stores a checkpoint only now and then."""

from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout
from storage.weights.stored_versions import restored_from
from storage.weights.tensor_sets import pull
from tests.storage.journal.test_retention import a_run, plan_iteration, publish_version, versions


def test_without_a_checkpoint_of_its_own_a_version_keeps_the_newest_before_it():
    """A trainer reads that one, and the parts of the iterations since."""
    store = a_run(6)
    for version in (3, 5, 6):
        for key in store.list(layout.checkpoint(version)):
            store.delete(key)
    swept = sweep(store, RetentionConfig(keep_checkpoints=1))
    assert swept.compacted == tuple(range(6))
    assert versions(store, layout.CHECKPOINTS) == [4]
    assert (restored_from(store, 6), restored_from(store, 4), restored_from(store, 3)) == (4, 4, 0)
    # A newer one whose weights are not published yet does not count: the iteration may be trained again.
    plan_iteration(store, 6)
    publish_version(store, 7)
    sweep(store, RetentionConfig(keep_checkpoints=1))
    assert versions(store, layout.CHECKPOINTS) == [4, 7]


def test_a_trainer_that_was_frozen_while_it_wrote_the_newest_checkpoint_finds_its_objects_when_it_wakes_up():
    """Its weights were published, so others went on from the checkpoint before, by replays."""
    store = a_run(5)
    manifests = [layout.manifest(layout.checkpoint(version)) for version in (4, 5)]
    body = store.get(manifests[0])
    for key in manifests:
        store.delete(key)
    frozen = everything_below(store, layout.checkpoint(4))
    sweep(store, RetentionConfig(keep_checkpoints=1))
    assert versions(store, layout.CHECKPOINTS) == [3]
    assert everything_below(store, layout.checkpoint(4)) == frozen
    store.put(manifests[0], body)
    assert restored_from(store, 5) == 4
    pull(store, layout.checkpoint(4))
    sweep(store, RetentionConfig(keep_checkpoints=1))
    assert versions(store, layout.CHECKPOINTS) == [4]


def test_what_is_left_of_a_checkpoint_without_a_manifest_goes_when_a_newer_one_is_stored():
    store = a_run(5)
    store.delete(layout.manifest(layout.checkpoint(3)))
    sweep(store, RetentionConfig(keep_checkpoints=1))
    assert versions(store, layout.CHECKPOINTS) == [5]
    assert not store.list(layout.checkpoint(3))


def test_a_manifest_that_a_frozen_trainer_writes_after_the_listing_goes_ahead_of_its_objects(monkeypatch):
    store = a_run(5)
    manifest = layout.manifest(layout.checkpoint(3))
    body = store.get(manifest)
    store.delete(manifest)
    listed, delete, left = store.list, store.delete, []

    def lists(prefix, after=""):
        found = listed(prefix, after)
        if prefix == layout.CHECKPOINTS:
            store.put(manifest, body)
        return found

    def deletes(key):
        if key.startswith(layout.checkpoint(3)):
            left.append(manifest in listed(layout.checkpoint(3)))
        delete(key)

    monkeypatch.setattr(store, "list", lists)
    monkeypatch.setattr(store, "delete", deletes)
    sweep(store, RetentionConfig(keep_checkpoints=1))
    assert left[0]
    assert not any(left[1:])
    assert len(left) > 1
    assert not listed(layout.checkpoint(3))


def everything_below(store, prefix):
    return {key: store.get(key) for key in store.list(prefix)}
