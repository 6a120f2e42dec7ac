"""Evaluations in a run's directory: their addresses, their records, and the weights that they keep from retention."""

import json

import pytest

from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import canonical, layout, records
from storage.records.canonical import wrap
from storage.records.evaluation_records import EvaluationRecord
from storage.records.evaluations import (
    begun_evaluations,
    ended_evaluations,
    evaluations,
    signs_of_life,
    versions_under_evaluation,
)
from storage.records.records import PlanRecord
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from storage.weights.stored_versions import list_versions
from tests.committed_runs import run_of
from tests.journals import a_plan

DIGEST = "0123456789abcdef"


def an_evaluation(version, digest=DIGEST):
    return EvaluationRecord(
        weight_version=version, digest=digest, settings={}, metrics={}, prompts=(), created_at_s=1.0
    )


def end(store, version, digest=DIGEST):
    name = layout.evaluation_name(version, digest)
    records.commit(store, layout.evaluation(name), an_evaluation(version, digest))


def begin(store, version, digest=DIGEST):
    store.put(f"{layout.EVALUATIONS}{layout.evaluation_name(version, digest)}/{layout.plan(0)}", b"a plan")


@pytest.mark.parametrize("run", ["runs/a", "/runs/a", "s3://bucket/a", "memory://a", "file:///runs/a%20b", "."])
def test_the_url_of_an_evaluation_leads_back_to_its_run(run):
    name = layout.evaluation_name(12, DIGEST)
    url = layout.evaluation_url(run, name)
    assert layout.evaluated(url) == (run, name)
    assert layout.evaluated(f"{url}/") == (run, name)
    assert layout.evaluation_url(f"{run}/", name) == url


@pytest.mark.parametrize(
    "url", ["runs/a", "runs/a/evaluations", "evaluations/00000001-ab", "runs/a/evaluations/x", "a/evaluations/00000001"]
)
def test_other_urls_are_none(url):
    with pytest.raises(ValueError, match=r"^evaluation: url .* allowed: <run>/evaluations/<version>-<digest>$"):
        layout.evaluated(url)


@pytest.mark.slow
def test_a_directory_a_bucket_and_memory_open_what_is_nested_in_them(tmp_path, s3_url):
    for run in (str(tmp_path / "run"), f"{s3_url}/nested", "memory://nested-evaluation"):
        name = layout.evaluation_name(3, DIGEST)
        nested = connect(layout.evaluation_url(run, name))
        assert nested.create(layout.plan(0), b"a plan")
        end(connect(run), 3)
        assert connect(run).list(layout.EVALUATIONS) == [
            f"{layout.EVALUATIONS}{name}.json",
            f"{layout.EVALUATIONS}{name}/{layout.plan(0)}",
        ]
        assert connect(layout.evaluated(nested.url)[0]).url == connect(run).url
        assert [record.weight_version for record in evaluations(connect(run))] == [3]


def test_records_in_the_order_of_their_versions():
    store = MemoryStore()
    for version, digest in ((10, "aa"), (2, "bb"), (2, "aa")):
        end(store, version, digest)
        begin(store, version, digest)
    store.put(layout.evaluation_deck(layout.evaluation_name(2, "aa")), b"<html>")
    assert [(each.weight_version, each.digest) for each in evaluations(store)] == [(2, "aa"), (2, "bb"), (10, "aa")]
    assert evaluations(MemoryStore()) == []


def test_a_damaged_record_is_named_and_left_out(caplog):
    store = MemoryStore()
    end(store, 1, "bb")
    store.put(layout.evaluation("00000001-aa"), b"{}")
    assert [record.digest for record in evaluations(store)] == ["bb"]
    assert "left out: object 'evaluations/00000001-aa.json' is corrupt" in caplog.text


@pytest.mark.parametrize(
    "name", ["notes.json", "00000001-aa.json.bak", "1-aa.json", "00000001-AA.json", "x/plan.json", "00000001/a"]
)
def test_what_is_not_called_like_an_evaluation_is_none(name, caplog):
    store = MemoryStore()
    store.put(f"{layout.EVALUATIONS}{name}", b"a note")
    assert (evaluations(store), ended_evaluations(store), begun_evaluations(store)) == ([], [], [])
    assert versions_under_evaluation(store) == set()
    assert caplog.text == ""


def test_heartbeats_and_batches_of_what_has_not_ended_are_signs_of_life():
    store = MemoryStore()
    for version in (2, 3):
        begin(store, version)
        prefix = f"{layout.EVALUATIONS}{layout.evaluation_name(version, DIGEST)}/"
        for key in (layout.alive(0, "00000-a"), layout.batch(0, 0), layout.shard(0, "00000-a", 0)):
            store.put(f"{prefix}{key}", b"x")
    end(store, 2)
    assert begun_evaluations(store) == [layout.evaluation_name(3, DIGEST)]
    assert signs_of_life(store) == ([f"{prefix}{layout.alive(0, '00000-a')}"], [f"{prefix}{layout.batch(0, 0)}"])


def test_retention_keeps_what_an_evaluation_samples_from_until_it_has_ended():
    store = MemoryStore()
    run_of(store, 6)
    begin(store, 2)
    begin(store, 3)
    end(store, 3)
    assert versions_under_evaluation(store) == {2}
    sweep(store, RetentionConfig())
    assert list_versions(store, layout.WEIGHTS).complete == {0, 2, 5, 6}
    end(store, 2)
    sweep(store, RetentionConfig())
    assert list_versions(store, layout.WEIGHTS).complete == {0, 5, 6}


@pytest.mark.parametrize("elsewhere", ["s3://other/run", "..", "../../..", "../../", ""])
def test_a_plan_cannot_send_a_worker_elsewhere(elsewhere):
    body = json.loads(canonical.encode(a_plan(2, 2))) | {"weights_url": elsewhere}
    with pytest.raises(CorruptObject, match="weights_url"):
        records.decode(PlanRecord, "plan.json", wrap("plan.json", "plan", json.dumps(body).encode()))
