"""The facts of a run that the page shows above the responses: identity, progress, charts and cost."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.package_version import VERSION
from storage.records import layout
from storage.records.evaluations import evaluations
from storage.records.failures import last_failures
from storage.records.records import RunRecord
from storage.records.run import next_iteration, plans_in_flight, read_report, read_run
from storage.stores.store import ObjectMissing, ObjectStore
from tasks.configuration.deleted_fields import without_deleted
from tasks.configuration.in_force import in_force
from tasks.reporting import charts
from tasks.reporting.key_metrics import COMPARED, Metrics, compared_rows, costs_anything
from tasks.reporting.last_failures import failure_lines
from tasks.reporting.metrics_lines import metrics_lines, with_speed
from tasks.reporting.run_charts import run_charts

# So many of the last iterations say how long the next ones take.
RECENT = 5
# In the units of drawings, whose letters have 12 to 16 of them: three charts beside each other, or one on a telephone.
CHART_WIDTH = 480.0
# The columns of the table of iterations, by metric.
COLUMNS = {
    "reward": "reward",
    "mean length": "completions/mean_length",
    "entropy": "entropy",
    "tokens": "num_tokens",
    "tokens/s": "rollout/tokens_per_s",
    "lost": "preempt/count",
    "seconds": "timing_s/iteration",
    "dollars": "cost/usd_iter",
}


@dataclass(frozen=True, kw_only=True)
class ToGo:
    """The cost of the remaining iterations, estimated from the last few.

    Attributes:
        iterations: How many iterations remain.
        seconds: Their expected duration.
        usd: Their expected dollars.
    """

    iterations: int
    seconds: float
    usd: float


def committed_metrics(store: ObjectStore) -> list[dict[str, float | None]]:
    """Return the metrics of each committed iteration, in order, as in metrics.jsonl, with the speed of the rollout.

    Most come from metrics.jsonl, a single object; newer iterations come from their reports.
    """
    found: list[dict[str, float | None]] = []
    committed = next_iteration(store)
    for line in _lines(store):
        if line.get("iteration") == len(found) < committed:
            found.append(line)
    newer = [read_report(store, iteration) for iteration in range(len(found), committed)]
    found += map(json.loads, metrics_lines(newer).splitlines())
    return [with_speed(metrics) for metrics in found]


def summary(store: ObjectStore, now_s: float) -> dict[str, Any]:
    """Return what the page shows above the responses, as JSON values.

    The values are the last failures, the header, the charts (SVG), the newest iteration beside the previous iteration,
    and the table of iterations.

    Args:
        store: The run.
        now_s: The present time, in seconds since 1970.
    """
    run, history = read_run(store), committed_metrics(store)
    planned, config = [plan.iteration for plan in plans_in_flight(store)], run.config
    times = [metrics["time_s"] for metrics in history if metrics.get("time_s")]
    with_dollars = costs_anything(history)
    columns = {title: metric for title, metric in COLUMNS.items() if with_dollars or title != "dollars"}
    if history and not any("reward" in metrics for metrics in history):
        columns = {"loss": "loss"} | {title: metric for title, metric in columns.items() if title != "reward"}
    newest, previous = (history[-1] if history else {}), (history[-2] if len(history) > 1 else {})
    return {
        "url": store.url,
        "failures": failure_lines(store, last_failures(store, len(history))),
        "facts": run_facts(run) | spent_facts(run, history),
        "last_s": times[-1] if times else None,
        "looked_at_s": now_s,
        "config": in_force(without_deleted(config, to_read=True)) if config else "",
        "columns": list(columns),
        "iterations": [[_finite(metrics.get(name)) for name in columns.values()] for metrics in history],
        "planned": planned,
        "compared": [COMPARED, *compared_rows(newest, previous, with_dollars=with_dollars)],
        "charts": run_charts(dict(enumerate(history)), evaluations(store), CHART_WIDTH),
    }


def run_facts(run: RunRecord) -> dict[str, str]:
    """Return the identity of a run, by name: model, algorithm, size, origin, and the version of the viewing Gleaner."""
    algorithm = run.config.get("algorithm", {})
    choices = [str(algorithm[name]) for name in ("advantage_estimator", "policy_loss") if name in algorithm]
    facts = {
        "model": str(run.config.get("policy", {}).get("path", "")),
        "algorithm": ", ".join(choices),
        "responses per iteration": _responses_per_iteration(run.config),
        "begins with": "" if run.origin is None else run.origin.text,
        "prompts": "" if run.prompts_origin is None else run.prompts_origin.text,
        "Gleaner": VERSION,
    }
    return {name: value for name, value in facts.items() if value}


def spent_facts(run: RunRecord, history: Sequence[Metrics]) -> dict[str, str]:
    """Return the start time, the time and dollars so far, and an estimate for the rest of `forecast.iterations`."""
    seconds = _sum(history, "timing_s/iteration")
    with_dollars = costs_anything(history)
    facts = {
        "begun": charts.utc(run.created_at_s),
        "so far": _taken(len(history), seconds, _last(history, "cost/usd_run") if with_dollars else None),
    }
    rest = to_go(history, run.config)
    if rest is not None:
        taken = _taken(rest.iterations, rest.seconds, rest.usd if with_dollars else None)
        facts["to go"] = f"{taken}, at the pace of the last iterations"
    return facts


def _taken(iterations: int, seconds: float, usd: float | None) -> str:
    counted = f"{iterations:,} iteration{'s' * (iterations != 1)}, {charts.duration(seconds)}"
    return counted if usd is None else f"{counted}, {charts.amount(usd, '$')}"


def to_go(history: Sequence[Metrics], config: Mapping[str, Any]) -> ToGo | None:
    """The rest of the iterations that `forecast.iterations` says, each like the last few; None if nothing is known."""
    left = config.get("forecast", {}).get("iterations", 0) - len(history)
    recent = history[-RECENT:]
    if left <= 0 or not recent:
        return None
    each_s, each_usd = (_sum(recent, name) / len(recent) for name in ("timing_s/iteration", "cost/usd_iter"))
    return ToGo(iterations=left, seconds=left * each_s, usd=left * each_usd)


def _lines(store: ObjectStore) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl up to the first that is damaged; none if it is missing."""
    found: list[dict[str, Any]] = []
    try:
        body = store.get(layout.METRICS)
    except ObjectMissing:
        return found
    for text in body.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict):
            break
        found.append(line)
    return found


def _responses_per_iteration(config: Mapping[str, Any]) -> str:
    section = config.get("run", {})
    groups, size = section.get("num_prompts_per_step"), section.get("num_generations")
    return f"{groups} prompts x {size}" if groups and size else ""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _sum(history: Sequence[Metrics], metric: str) -> float:
    return sum(_finite(metrics.get(metric)) or 0.0 for metrics in history)


def _last(history: Sequence[Metrics], metric: str) -> float:
    return (_finite(history[-1].get(metric)) if history else None) or 0.0
