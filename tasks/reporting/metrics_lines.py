"""The metrics of all committed iterations as lines of JSON, for people and their tools; derived from the reports."""

import json
import math
from collections.abc import Iterable, Mapping

from storage.records import layout
from storage.records.evaluation_records import EvaluationRecord
from storage.records.evaluations import ended_evaluations, evaluations
from storage.records.records import ReportRecord
from storage.records.run import next_iteration, reports
from storage.stores.store import ObjectStore


def write_metrics(store: ObjectStore) -> list[ReportRecord]:
    """Write metrics.jsonl anew from the run's records; returns the reports, in order.

    A conclusion and an evaluation may write at the same time. A process that afterwards finds newer records writes
    again: the last writer has all records.
    """
    while True:
        ended = ended_evaluations(store)
        history = reports(store)
        store.put(layout.METRICS, metrics_lines(history, evaluations(store)))
        if (next_iteration(store), ended_evaluations(store)) == (len(history), ended):
            return history


def metrics_lines(history: Iterable[ReportRecord], evaluations: Iterable[EvaluationRecord] = ()) -> bytes:
    """One JSON object per report: iteration, weight version, time of commit (s since 1970), then its metrics.

    After a report come the evaluations of the weight version that it published; they name their settings instead of an
    iteration. Version 0's come first. A number that JSON lacks (infinite, NaN) becomes null.
    """
    lines = [(report.weight_version, _line({"iteration": report.iteration}, report)) for report in history]
    lines += [(record.weight_version, _line({"evaluation": record.digest}, record)) for record in evaluations]
    # The sort is stable.
    return b"".join(line for _, line in sorted(lines, key=lambda numbered: numbered[0]))


def with_speed(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the metrics of an iteration with `rollout/tokens_per_s`, if the tokens and the seconds were measured."""
    tokens, seconds = metrics.get("num_tokens"), metrics.get("timing_s/rollout")
    return {**metrics, "rollout/tokens_per_s": tokens / seconds} if tokens and seconds else dict(metrics)


def _line(subject: dict[str, int | str], record: ReportRecord | EvaluationRecord) -> bytes:
    values = {name: value if math.isfinite(value) else None for name, value in sorted(record.metrics.items())}
    head = {**subject, "weight_version": record.weight_version, "time_s": record.created_at_s}
    return json.dumps(head | values, allow_nan=False).encode() + b"\n"
