"""Exports of runs that lost something: one line and nothing written, never a part that looks whole."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from storage.journal.compaction import compact
from storage.journal.response_parts import ResponsesRecord
from storage.journal.retention import settle
from storage.records import layout, records
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from tasks.reporting.export import export_rollouts
from tasks.reporting.export_model import choose_version
from tests.committed_runs import PROMPTS, TOKENS, begin, grade, plan_iteration, roll_out, run_of


@pytest.fixture
def store():
    """Iterations 0 and 1 are committed, of two batches each."""
    found = MemoryStore("lost")
    run_of(found, 2)
    begin(found, {})
    return found


def refused(store, iteration, folder, what):
    with pytest.raises(CorruptObject, match=what):
        export_rollouts(store, str(iteration), folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_batch_of_a_committed_iteration_is_missing(store, tmp_path, is_compacted):
    if is_compacted:
        compact(store, 1)
    keys = store.list(layout.batches(1))
    for key in keys:
        whole = store.get(key)
        store.delete(key)
        refused(store, 1, tmp_path, "batches")
        store.put(key, whole)
    assert export_rollouts(store, "1", tmp_path)[0].responses == 4


def test_a_batch_of_an_open_iteration_is_missing_before_another(store, tmp_path):
    plan = plan_iteration(store, 2)
    roll_out(store, plan)
    for number, responses in enumerate([(0, 1), (2, 3)]):
        grade(store, plan, number, responses)
    store.delete(layout.batch(2, 0))
    refused(store, 2, tmp_path, r"batches/000000.json' is corrupt: it is missing, although ")


@pytest.mark.parametrize("kept", [0, 1])
def test_parts_are_missing_from_the_record_of_a_compacted_iteration(store, tmp_path, kept):
    compact(store, 1, part_tokens=5)
    settle(store, 1)
    key = layout.responses(1)
    record = records.read(store, ResponsesRecord, key)
    records.put(store, key, replace(record, parts=record.parts[:kept]))
    refused(store, 1, tmp_path, r"\d responses are stored, and the batches name 4")


def test_the_weights_of_the_last_iteration_are_missing(store):
    assert choose_version(store, None) == 2
    for key in store.list(layout.weights(2)):
        store.delete(key)
    with pytest.raises(LookupError, match="version: 2 iterations are committed, and weight version 2 is missing"):
        choose_version(store, None)
    assert choose_version(store, 1) == 1


def test_the_tokens_of_prompts_are_those_that_the_policy_read(store, tmp_path):
    [written] = export_rollouts(store, "1", tmp_path)
    table = pq.read_table(written.path).to_pydict()
    assert table["token_ids"] == [TOKENS[response] for response in range(4)]
    assert table["prompt_ids"] == [list(PROMPTS[group].token_ids) for group in table["group"]]
