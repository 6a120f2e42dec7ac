"""Retention while rollout runs ahead: two iterations are in flight, and the newer one samples from older weights."""

import pytest

from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout, records
from storage.records.run import read_plan
from storage.stores.memory import MemoryStore
from storage.weights.stored_versions import list_versions
from tests.committed_runs import commit, plan_iteration, publish_version, run_of
from tests.journals import a_plan


def a_run(iterations):
    store = MemoryStore()
    run_of(store, iterations)
    return store


def versions(store, prefix):
    return sorted(list_versions(store, prefix).complete)


def test_what_an_iteration_that_runs_ahead_samples_from_stays():
    """Iteration 4 is planned from version 3 and rolled out while 3 is trained; 3 is committed; 4 is trained."""
    store = a_run(3)
    plan_iteration(store, 3)
    ahead = a_plan(groups=2, generations=2, iteration=4, weight_version=3)
    records.commit(store, layout.plan(4), ahead)
    for version in (4, 5):
        publish_version(store, version)
    sweep(store, RetentionConfig())
    assert versions(store, layout.WEIGHTS) == [0, 3, 4, 5]
    commit(store, read_plan(store, 3))
    sweep(store, RetentionConfig())
    assert versions(store, layout.WEIGHTS) == [0, 3, 4, 5]
    assert layout.plan(4) in store.list(layout.iteration(4))
    commit(store, ahead)
    sweep(store, RetentionConfig())
    assert versions(store, layout.WEIGHTS) == [0, 4, 5]


@pytest.mark.slow
def test_when_a_plan_that_runs_ahead_cannot_be_read_no_weights_go():
    store = a_run(6)
    store.put(layout.plan(6), b"{}")
    before = versions(store, layout.WEIGHTS)
    swept = sweep(store, RetentionConfig())
    assert versions(store, layout.WEIGHTS) == before
    assert [problem.split(":")[0] for problem in swept.problems] == ["weights"]
    assert versions(store, layout.CHECKPOINTS) == [5, 6]
