"""The header and the charts of a run, from metrics.jsonl and from reports."""

import json
from dataclasses import replace

import pytest

from storage.records import layout, records
from storage.records.records import ReportRecord
from storage.records.run import read_run
from storage.stores.memory import MemoryStore
from tasks.reporting.metrics_lines import write_metrics
from tasks.viewing.run_summary import committed_metrics, spent_facts, summary, to_go
from tests.committed_runs import begin, run_of
from tests.watched_run import Counted


@pytest.fixture
def store():
    found = Counted()
    run_of(found, 3)
    for iteration in range(3):
        report = records.read(found, ReportRecord, layout.report(iteration))
        metrics = {
            "reward": iteration / 4,
            "num_tokens": 100.0,
            "timing_s/rollout": 4.0,
            "cost/usd_iter": 1.0,
            "cost/usd_run": iteration + 1.0,
        }
        records.put(found, layout.report(iteration), replace(report, metrics=metrics, created_at_s=float(iteration)))
    return found


def test_metrics_come_from_one_object_and_from_what_is_newer(store):
    plain = committed_metrics(store)
    assert [metrics["reward"] for metrics in plain] == [0.0, 0.25, 0.5]
    assert [metrics["rollout/tokens_per_s"] for metrics in plain] == [25.0] * 3
    write_metrics(store)
    store.asked.clear()
    again = committed_metrics(store)
    assert [metrics["reward"] for metrics in again] == [0.0, 0.25, 0.5]
    # Only the bisection reads reports, a byte of each.
    assert store.asked.count(layout.METRICS) == 1
    lines = store.get(layout.METRICS).splitlines(keepends=True)
    store.put(layout.METRICS, lines[0] + b'{"iteration": 1, "rew')
    assert [metrics["reward"] for metrics in committed_metrics(store)] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("body", [b"[]\n", b'{"iteration": 7}\n', b"\xff\n", b"null\n"])
def test_metrics_that_are_damaged_are_read_from_the_reports(store, body):
    store.put(layout.METRICS, body)
    assert [metrics["reward"] for metrics in committed_metrics(store)] == [0.0, 0.25, 0.5]


def test_a_run_without_iterations_has_a_summary():
    store = MemoryStore("empty")
    begin(store)
    found = summary(store, 5.0)
    assert (found["iterations"], found["planned"]) == ([], [])
    assert found["facts"]["so far"] == "0 iterations, 0 s"
    assert "to go" not in found["facts"]
    assert json.loads(json.dumps(found, allow_nan=False))["charts"]


def test_the_rest_takes_as_long_as_the_last_iterations():
    history = [{"timing_s/iteration": 1e9, "cost/usd_iter": 1e9}] + [
        {"timing_s/iteration": 3600.0, "cost/usd_iter": 2.0}
    ] * 5
    rest = to_go(history, {"forecast": {"iterations": 10}})
    assert (rest.iterations, rest.seconds, rest.usd) == (4, 4 * 3600.0, 8.0)
    assert to_go(history, {"forecast": {"iterations": 6}}) is None
    assert to_go([], {"forecast": {"iterations": 6}}) is None


def test_page_and_deck_say_what_a_run_took_and_what_it_still_takes(store):
    run = replace(read_run(store), created_at_s=0.0, config={"forecast": {"iterations": 13}})
    each = {"timing_s/iteration": 1800.0, "cost/usd_iter": 2.0}
    history = [each | {"cost/usd_run": 2.0 * number} for number in (1, 2, 3)]
    assert spent_facts(run, history) == {
        "begun": "1970-01-01 00:00 UTC",
        "so far": "3 iterations, 1 h 30 min, $6.00",
        "to go": "10 iterations, 5 h 00 min, $20.00, at the pace of the last iterations",
    }
    assert spent_facts(replace(run, config={}), history[:1])["so far"] == "1 iteration, 30 min 00 s, $2.00"
    assert "to go" not in spent_facts(replace(run, config={}), history)


def test_the_newest_iteration_stands_beside_the_one_before(store):
    header, *rows = summary(store, 5.0)["compared"]
    assert header == ("", "this iteration", "the one before")
    assert rows[0] == ("mean reward", "0.500", "0.250")
    assert ("cost of the run so far", "$3.00", "$2.00") in rows
    assert ("speed of the rollout", "25 tokens/s", "25 tokens/s") in rows


def test_there_are_no_dollars_where_nobody_pays(store):
    for iteration in range(3):
        report = records.read(store, ReportRecord, layout.report(iteration))
        free = report.metrics | {"cost/usd_iter": 0.0, "cost/usd_run": 0.0, "timing_s/iteration": 10.0}
        records.put(store, layout.report(iteration), replace(report, metrics=free))
    found = summary(store, 5.0)
    assert "dollars" not in found["columns"]
    assert len(found["iterations"][0]) == len(found["columns"])
    assert found["facts"]["so far"] == "3 iterations, 30 s"
    shown = json.dumps({name: found[name] for name in ("facts", "compared", "charts")})
    assert "$" not in shown
    assert "ollars" not in shown
