"""Retention of a run that stores a checkpoint only now and then."""

from storage import layout
from storage.retention import sweep
from storage.retention_config import RetentionConfig
from storage.stored_versions import restored_from
from tests.storage.test_retention import a_run, plan_iteration, publish_version, versions


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
