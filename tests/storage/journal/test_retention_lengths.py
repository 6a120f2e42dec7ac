"""Old tables of lengths go; what a plan or a conclusion may still read stays."""

from dataclasses import replace

import pytest

from storage.journal.retention import LENGTH_TABLES_KEPT, sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout
from storage.records.length_tables import commit_lengths, empty_table
from storage.stores.memory import MemoryStore
from tests.committed_runs import run_of


@pytest.mark.slow
def test_the_newest_tables_stay_and_what_is_no_table_too():
    store = MemoryStore()
    run_of(store, 6)
    # The seventh iteration is being concluded: its table is there, its report is not.
    for iteration in range(7):
        commit_lengths(store, replace(empty_table(), iteration=iteration))
    store.put("lengths/notes.txt", b"x")
    old = [layout.lengths(iteration) for iteration in range(6 - LENGTH_TABLES_KEPT)]
    kept = [*(layout.lengths(iteration) for iteration in range(6 - LENGTH_TABLES_KEPT, 7)), "lengths/notes.txt"]
    swept = sweep(store, RetentionConfig(), dry_run=True)
    assert [key for key in swept.deleted if key.startswith(layout.LENGTHS)] == old
    swept = sweep(store, RetentionConfig())
    assert swept.counts()["lengths"] == len(old)
    assert store.list(layout.LENGTHS) == kept
    assert "lengths" not in sweep(store, RetentionConfig()).counts()
