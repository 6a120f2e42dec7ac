"""A sweep believes the batches of an iteration only if they account for every response of its plan."""

import pytest

from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout
from storage.stores.memory import MemoryStore
from tests.committed_runs import run_of


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_iteration_whose_batches_are_lost_keeps_its_journal(dry_run):
    store = MemoryStore()
    run_of(store, 2)
    for key in store.list(layout.batches(0)):
        store.delete(key)
    before = store.list(layout.iteration(0))
    swept = sweep(store, RetentionConfig(), dry_run=dry_run)
    assert swept.compacted == (1,)
    [problem] = swept.problems
    assert problem == (
        "iteration 0: object 'iterations/000000/batches/' is corrupt: 0 responses are recorded and 0 are unused; "
        "the plan has 4, each of them once"
    )
    assert store.list(layout.iteration(0)) == before
