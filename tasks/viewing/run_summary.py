"""What people want to know of a run before they read its responses: what it is, how it goes, what it costs."""

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
from tasks.configuration.in_force import in_force
from tasks.reporting import charts
from tasks.reporting.last_failures import failure_lines
from tasks.reporting.metrics_lines import metrics_lines, rollout_tokens_per_s
from tasks.reporting.reward_chart import reward_chart

# So many of the last iterations say how long the next ones take.
RECENT = 5
# In the units of drawings, whose letters have 12 to 16 of them: three charts beside each other, or one on a telephone.
CHART_WIDTH = 480.0
# Title, unit, and the metrics of each chart but the first, by their names in the legend.
_CHARTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("Length of the responses", "tokens", {"maximum": "completions/max_length", "mean": "completions/mean_length"}),
    ("Entropy", "nats", {"entropy": "entropy"}),
    ("Mismatch between sampler and trainer", "KL", {"mismatch": "mismatch_kl"}),
    ("Speed of the rollout", "tokens/s", {"speed": "rollout/tokens_per_s"}),
    ("Dollars so far", "dollars", {"dollars": "cost/usd_run"}),
)
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
Metrics = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class ToGo:
    """What the rest of a run takes if it goes on as it did lately: iterations, seconds and dollars."""

    iterations: int
    seconds: float
    usd: float


def committed_metrics(store: ObjectStore) -> list[dict[str, float | None]]:
    """The metrics of each committed iteration, in order, as in metrics.jsonl, with the speed of its rollout.

    They come from that file, which is one object, and from the reports that are newer than it.
    """
    found: list[dict[str, float | None]] = []
    committed = next_iteration(store)
    for line in _lines(store):
        if line.get("iteration") == len(found) < committed:
            found.append(line)
    newer = [read_report(store, iteration) for iteration in range(len(found), committed)]
    found += map(json.loads, metrics_lines(newer).splitlines())
    for metrics in found:
        speed = rollout_tokens_per_s(metrics)
        if speed is not None:
            metrics["rollout/tokens_per_s"] = speed
    return found


def summary(store: ObjectStore, now_s: float) -> dict[str, Any]:
    """What failed last, the header, the charts (SVG) and the table of iterations, as JSON values.

    now_s: the time of the look.
    """
    run, history = read_run(store), committed_metrics(store)
    planned, config = [plan.iteration for plan in plans_in_flight(store)], run.config
    times = [metrics["time_s"] for metrics in history if metrics.get("time_s")]
    return {
        "url": store.url,
        "failures": failure_lines(store, last_failures(store, len(history))),
        "facts": run_facts(run) | spent_facts(run, history),
        "last_s": times[-1] if times else None,
        "looked_at_s": now_s,
        "config": in_force(config) if config else "",
        "columns": list(COLUMNS),
        "iterations": [[_plain(metrics.get(name)) for name in COLUMNS.values()] for metrics in history],
        "planned": planned,
        "charts": [reward_chart(_curve(history, "reward"), evaluations(store), CHART_WIDTH), *metric_charts(history)],
    }


def run_facts(run: RunRecord) -> dict[str, str]:
    """What a run is, by name: its model, its algorithm, its size, and the version of Gleaner that looks at it."""
    algorithm = run.config.get("algorithm", {})
    choices = [str(algorithm[name]) for name in ("advantage_estimator", "policy_loss") if name in algorithm]
    facts = {
        "model": str(run.config.get("policy", {}).get("path", "")),
        "algorithm": ", ".join(choices),
        "responses per iteration": _responses_per_iteration(run.config),
        "Gleaner": VERSION,
    }
    return {name: value for name, value in facts.items() if value}


def spent_facts(run: RunRecord, history: Sequence[Metrics]) -> dict[str, str]:
    """When the run began, what its iterations took, and what those take that `forecast.iterations` still lacks."""
    seconds = _sum(history, "timing_s/iteration")
    facts = {
        "begun": charts.utc(run.created_at_s),
        "so far": _taken(len(history), seconds, _last(history, "cost/usd_run")),
    }
    rest = to_go(history, run.config)
    if rest is not None:
        facts["to go"] = f"{_taken(rest.iterations, rest.seconds, rest.usd)}, if they go on as the last ones"
    return facts


def _taken(iterations: int, seconds: float, usd: float) -> str:
    counted = f"{iterations:,} iteration{'s' * (iterations != 1)}"
    return f"{counted}, {charts.duration(seconds)}, {charts.amount(usd, '$')}"


def to_go(history: Sequence[Metrics], config: Mapping[str, Any]) -> ToGo | None:
    """The rest of the iterations that `forecast.iterations` says, each like the last few; None if nothing is known."""
    left = config.get("forecast", {}).get("iterations", 0) - len(history)
    recent = history[-RECENT:]
    if left <= 0 or not recent:
        return None
    each_s, each_usd = (_sum(recent, name) / len(recent) for name in ("timing_s/iteration", "cost/usd_iter"))
    return ToGo(iterations=left, seconds=left * each_s, usd=left * each_usd)


def metric_charts(history: Sequence[Metrics]) -> list[str]:
    """The other charts, without those that no iteration has a value for."""
    drawn = []
    for title, unit, metrics in _CHARTS:
        series = {label: _curve(history, metric) for label, metric in metrics.items()}
        if any(series.values()):
            drawn.append(charts.line_chart(series, title, "iteration", unit, CHART_WIDTH))
    return drawn


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


def _curve(history: Sequence[Metrics], metric: str) -> list[tuple[float, float]]:
    return [(float(at), value) for at, each in enumerate(history) if (value := _plain(each.get(metric))) is not None]


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _sum(history: Sequence[Metrics], metric: str) -> float:
    return sum(_plain(metrics.get(metric)) or 0.0 for metrics in history)


def _last(history: Sequence[Metrics], metric: str) -> float:
    return (_plain(history[-1].get(metric)) if history else None) or 0.0
