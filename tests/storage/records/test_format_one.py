"""Format 1 as it was shipped: what is written today is the same byte for byte, and the files are read.

The files are tests/data/format_1, which tests/format_one.py wrote.
"""

from dataclasses import fields

import numpy as np
import pytest
from safetensors.numpy import load

from storage.clock import ManualClock
from storage.journal.compaction import compact, read_responses
from storage.journal.responses import decode_responses
from storage.journal.shard import Finish, Origin, decode_shard
from storage.records import layout
from storage.records.length_tables import decode_lengths, encode_lengths
from storage.records.prompt_table import read_prompts
from storage.records.run import execution_of, read_plan, read_run, read_settings
from storage.records.teacher_scores import decode_scores
from storage.stores.memory import MemoryStore
from storage.weights.tensor_sets import pull
from storage.weights.versions import pull_version
from tests import format_one
from tests.teacher_of_format_one import CONFIGURATION, SCORES

SHIPPED = {
    path.relative_to(format_one.FOLDER).as_posix(): path.read_bytes()
    for path in format_one.FOLDER.rglob("*")
    if path.is_file()
}
# Compressed bytes, and so the digests that name them, may differ between releases of pyarrow; what is in them may not.
COMPRESSED = sorted(
    key
    for key in SHIPPED
    if key.endswith(".arrow") or key.startswith("weights/00000001/") or key == layout.responses(0)
)
# Where version 0.1.0 put the settings, with the whole configuration. Machines that join a run may write there.
# Failures of slots lay in the iteration; they are for people, and no reader looks there any more.
PASSED_OVER = {
    "iterations/000000/settings.json",
    "iterations/000000/failures/67520363fc51df82c70adb56617f82d8/00000-0123456789abcdef.json",
}
# Written in format 2 today.
NEWER = layout.lengths(0)


@pytest.fixture
def store():
    found = MemoryStore("run")
    for key, body in SHIPPED.items():
        found.put(key, body)
    return found


def test_what_is_written_today_is_what_was_shipped():
    written = format_one.objects()
    assert {key for key in written if key not in COMPRESSED} == SHIPPED.keys() - {*COMPRESSED, *PASSED_OVER}
    assert [key for key in written if key not in COMPRESSED and written[key] != SHIPPED[key]] == [NEWER]


@pytest.mark.parametrize("key", [key for key in COMPRESSED if "/journal/" in key])
def test_shards(key):
    expected, found = format_one.SHARDS[key], decode_shard(key, SHIPPED[key])
    assert len(found) == len(expected)
    for ours, theirs in zip(expected, found, strict=True):
        names = ("response", "epoch", "start", "weight_version", "finish", "origin", "event")
        assert all(getattr(ours, name) == getattr(theirs, name) for name in names)
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()


def test_a_teacher_and_its_scores(store):
    manifest, tensors = pull(store, layout.teacher("teacher"))
    assert manifest.metadata["config"] == CONFIGURATION
    assert list(tensors) == ["embed", "norm"]
    key = layout.teacher_scores(0, 0)
    found = decode_scores(key, SHIPPED[key])
    for ours, theirs in zip(SCORES, found, strict=True):
        assert (ours.response, ours.teacher) == (theirs.response, theirs.teacher)
        for name in ("logprobs", "agrees", "head_ids", "head_logprobs"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()


def test_the_codes_of_ends_and_origins():
    codes = {"RUNNING": 0, "STOP": 1, "LENGTH": 2, "RELEASED": 3, "ACTING": 4, "FAILED": 5, "AGAIN": 6}
    assert {mark.name: mark.value for mark in Finish} == codes
    assert {origin.name: origin.value for origin in Origin} == {"POLICY": 0, "OBSERVATION": 1}


def test_a_run_from_before_sources_is_read(store):
    assert b'"sources"' not in SHIPPED[layout.RUN]
    assert read_run(store).sources == {}


def test_a_run_from_before_settings_had_their_own_place_is_read_and_what_lies_there_is_not_believed(store):
    store.delete(layout.settings(0))
    assert read_settings(store, 0) is None
    assert execution_of(store, 0) is None


def test_prompts(store):
    assert read_prompts(store, read_plan(store, 0)) == format_one.PROMPTS


def test_responses(store):
    found = decode_responses("k", SHIPPED[layout.responses_part(0, 0, 1)])
    assert all(a.equals(b) for a, b in zip(format_one.responses(), found, strict=True))
    assert [row.token_ids.tolist() for row in read_responses(store, 0)] == [[5, 6, 7, 8, 2], [9, 70_000]]


def test_the_journal_gives_the_same_responses(store):
    for key in (layout.responses(0), layout.responses_part(0, 0, 1), layout.closed(0)):
        store.delete(key)
    compact(store, 0)
    found = decode_responses("k", store.get(layout.responses_part(0, 0, 1)))
    assert all(a.equals(b) for a, b in zip(format_one.responses(), found, strict=True))


def test_the_run_and_its_model(store):
    assert read_run(store).model_files == format_one.DIGESTS


def test_tensors(store):
    assert bytes(pull(store, layout.weights(0))[1]["embed"].data) == format_one.EMBED
    manifest, tensors = pull_version(store, 1, None, ManualClock())
    assert [manifest.tensors[name].encoding for name in ("embed", "norm")] == ["diff-zstd", "same"]
    assert bytes(tensors["embed"].data) == format_one.EMBED_CHANGED
    assert bytes(tensors["norm"].data) == bytes(range(12))


def test_learned_lengths():
    table = decode_lengths(layout.lengths(0), SHIPPED[layout.lengths(0)])
    shipped = load(SHIPPED[layout.lengths(0)])
    # A predictor and the two tensors that it alone wrote are deleted since.
    assert {*shipped} - {field.name for field in fields(table)} == {"gram", "moment"}
    assert shipped["recall"].shape[0] == 4
    np.testing.assert_array_equal(table.recall, shipped["recall"][[0, 1, 3]])
    np.testing.assert_array_equal(table.high_ratio, shipped["high_ratio"][[0, 1, 3]])
    for name in ("prompts", "mean", "weights", "quantiles"):
        np.testing.assert_array_equal(getattr(table, name), shipped[name])
    assert encode_lengths(decode_lengths("again", encode_lengths(table))) == encode_lengths(table)
    assert np.isnan(table.deviation).tolist() == [False, True]
