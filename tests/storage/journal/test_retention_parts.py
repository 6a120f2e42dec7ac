"""What a sweep does with parts of responses that processes left which divided them otherwise, or were killed."""

from storage.journal.compaction import compact, read_responses
from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout
from tests.committed_runs import TOKENS
from tests.storage.journal.test_retention import DEFAULT, a_run


def test_parts_that_no_record_names_go_once_there_is_a_record():
    store, smaller = a_run(2), a_run(2)
    compact(smaller, 0, part_tokens=5)
    left = smaller.list(layout.responses_parts(0))
    for key in left:
        store.put(key, smaller.get(key))
    assert sweep(store, RetentionConfig(compact=False)).deleted == ()
    assert set(left) <= set(sweep(store, DEFAULT).deleted)
    assert store.list(layout.responses_parts(0)) == [layout.responses_part(0, 0, 3)]
    # A process that had divided the responses otherwise was frozen meanwhile.
    store.put(left[0], smaller.get(left[0]))
    assert sweep(store, DEFAULT, dry_run=True).deleted == (left[0],)
    assert sweep(store, DEFAULT).counts() == {"responses": 1}
    assert [row.token_ids.tolist() for row in read_responses(store, 0)] == [TOKENS[r] for r in range(4)]


def test_parts_without_a_record_stay_when_the_journal_cannot_be_compacted():
    store, smaller = a_run(1), a_run(1)
    compact(smaller, 0, part_tokens=5)
    left = smaller.list(layout.responses_parts(0))
    for key in left:
        store.put(key, smaller.get(key))
    store.delete(layout.batch(0, 0))
    [problem] = sweep(store, DEFAULT).problems
    assert "0 responses are recorded" in problem
    assert store.list(layout.responses_parts(0)) == left
