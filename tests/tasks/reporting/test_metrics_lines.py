"""metrics.jsonl: a line per report, JSON whatever the numbers are."""

import json

from storage.records.evaluation_records import EvaluationRecord
from storage.records.records import ReportRecord
from tasks.reporting.metrics_lines import metrics_lines


def report(iteration, **metrics):
    return ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=0,
        metrics=metrics,
        rewards=(1.0,),
        lengths=(1,),
        lives=(),
        train_started_at_s=0.0,
        train_ended_at_s=0.0,
        created_at_s=100.5 + iteration,
    )


def test_a_line_has_every_metric_by_its_name():
    lines = metrics_lines([report(0, **{"reward": 0.25, "completions/mean_length": 3.0}), report(1, reward=0.5)])
    assert lines.endswith(b"\n")
    assert [json.loads(line) for line in lines.splitlines()] == [
        {"iteration": 0, "weight_version": 1, "time_s": 100.5, "reward": 0.25, "completions/mean_length": 3.0},
        {"iteration": 1, "weight_version": 2, "time_s": 101.5, "reward": 0.5},
    ]


def test_the_order_of_metrics_does_not_depend_on_that_of_the_report():
    assert metrics_lines([report(0, a=1.0, b=2.0)]) == metrics_lines([report(0, b=2.0, a=1.0)])


def test_numbers_that_json_lacks_are_null():
    [line] = metrics_lines([report(0, a=float("nan"), b=float("inf"), c=float("-inf"), d=1e300)]).splitlines()
    assert b"NaN" not in line
    assert b"Infinity" not in line
    values = json.loads(line)
    assert [values[name] for name in "abcd"] == [None, None, None, 1e300]


def test_without_reports_there_are_no_lines():
    assert metrics_lines([]) == b""


def evaluation(version, digest, **metrics):
    return EvaluationRecord(
        weight_version=version, digest=digest, settings={}, metrics=metrics, prompts=(), created_at_s=7.0
    )


def test_evaluations_come_after_the_report_that_published_their_version():
    told = [evaluation(0, "aa"), evaluation(1, "aa", **{"val/pass@1": 0.5}), evaluation(1, "bb"), evaluation(2, "aa")]
    lines = [json.loads(line) for line in metrics_lines([report(0), report(1)], told).splitlines()]
    shown = [(line["weight_version"], line.get("iteration", line.get("evaluation"))) for line in lines]
    assert shown == [(0, "aa"), (1, 0), (1, "aa"), (1, "bb"), (2, 1), (2, "aa")]
    assert lines[2] == {"weight_version": 1, "evaluation": "aa", "time_s": 7.0, "val/pass@1": 0.5}
