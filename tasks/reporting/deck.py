"""The pages of an iteration's Deck: tab name to HTML, drawn from the iteration's report and earlier reports.

They show what a report holds: a missing metric has no row, no point and no bar. This module writes nothing and knows no
Flyte.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from resources.visible_text import markup
from storage.records.evaluation_records import EvaluationRecord
from storage.records.records import ReportRecord
from tasks.reporting import charts
from tasks.reporting.costs import usd_per_reward_point
from tasks.reporting.metrics_lines import rollout_tokens_per_s
from tasks.reporting.reward_chart import reward_chart
from tasks.reporting.timeline import timeline

# Derived from two others, and not in a report.
_SPEED = "rollout/tokens_per_s"
# (metric, its name for people, unit)
_KEY_METRICS = (
    ("reward", "mean reward", ""),
    (_SPEED, "speed of the rollout", "tokens/s"),
    ("cost/usd_iter", "cost of the iteration", "$"),
    ("cost/usd_run", "cost of the run so far", "$"),
    ("timing_s/iteration", "iteration", "s"),
    ("preempt/count", "processes lost", ""),
    ("resume/tokens_recovered", "tokens recovered from the journal", "tokens"),
    ("resume/tokens_regenerated", "tokens generated again", "tokens"),
    ("reward_std", "standard deviation of the reward", ""),
    ("frac_reward_zero_std", "groups without a learning signal", "%"),
    ("completions/mean_length", "mean length", "tokens"),
    ("completions/max_length", "maximum length", "tokens"),
    ("completions/clipped_ratio", "responses cut at the length limit", "%"),
    ("num_tokens", "tokens generated", "tokens"),
    ("rollout/prefill_share", "prefill computed, relative to prefill without sharing", "%"),
    ("timing_s/rollout", "rollout", "s"),
    ("timing_s/train", "training", "s"),
    ("cost/usd_rollout", "cost of rollout", "$"),
    ("cost/usd_train", "cost of training", "$"),
    ("cost/usd_per_mtok", "cost per million tokens", "$"),
    ("weights/bytes", "bytes of the published weight version", "bytes"),
    ("kl", "KL to the reference", ""),
    ("entropy", "entropy", ""),
    ("actor/grad_norm", "gradient norm", ""),
    ("mismatch_kl", "KL between sampler and trainer", ""),
)
METRICS_IN_WORDS = {metric: (label, unit) for metric, label, unit in _KEY_METRICS}
# Who caused an iteration's dollars, and what they were spent on; each time, together these are all of them.
_PAYEES = {
    "rollout": "cost/usd_rollout",
    "train": "cost/usd_train",
    "requests": "cost/usd_requests",
    "egress": "cost/usd_egress",
    "control": "cost/usd_control",
}
_PURPOSES = {
    "useful": "cost/usd_useful",
    "wasted": "cost/usd_wasted",
    "starting": "cost/usd_starting",
    "idle": "cost/usd_idle",
    "requests": "cost/usd_requests",
    "egress": "cost/usd_egress",
    "control": "cost/usd_control",
}
# These are zero unless something is configured that most runs do not have: then they have no row and no bar.
_OPTIONAL = frozenset({"kl", "cost/usd_requests", "cost/usd_egress", "cost/usd_control"})
_METRICS_MAX = 200
_NOTES_MAX = 8
# Of the document; in Flyte's console the tabs stand on a page of its own, which is light.
_STYLE = (
    ":root{color-scheme:light dark;--accent:#0550ae}"
    "body{margin:0;padding:12px;font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;"
    "background:var(--card,#ffffff);color:var(--ink,#1b1f24);overflow-wrap:anywhere}a{color:var(--accent)}"
    "h1{font-size:22px}h2{font-size:19px}svg{min-width:560px}"
    "@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--muted:#a3adb8;--grid:#30363d;--card:#161b22;"
    "--border:#3d444d;--accent:#79c0ff}}"
)
_PAGE = (
    "font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;font-size:14px;line-height:1.5;"
    "color:var(--ink,#1b1f24);background:var(--card,#ffffff);padding:16px;overflow-x:auto"
)
_GRID = "display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(560px,100%),1fr))"
_CELL = "padding:3px 14px 3px 0;border-bottom:1px solid var(--grid,#e3e6ea)"
_NUMBER = f"{_CELL};text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"


def render(
    report: ReportRecord,
    history: Sequence[ReportRecord],
    notes: Sequence[str] = (),
    facts: Mapping[str, str] = MappingProxyType({}),
    evaluated: Sequence[EvaluationRecord] = (),
) -> dict[str, str]:
    """The tabs of the Deck, in order: name to a self-contained piece of HTML without scripts, under 100 kB each.

    Args:
        report: The iteration shown.
        history: Reports of the run in any order; `report` replaces one of its own iteration.
        notes: Sentences that people should read first; the first few are shown.
        facts: What the run is, by name: its url, model and the like.
        evaluated: The run's evaluations, for the chart of the reward.
    """
    reports = _in_order(report, history)
    return {
        "Overview": styled(_overview(report, reports, notes, facts, evaluated)),
        "Lengths": styled(_lengths(report, reports)),
        "Slots": styled(_slots(report)),
        "Cost": styled(_cost(report, reports)),
    }


def page(title: str, tabs: Mapping[str, str]) -> str:
    """All tabs one below the other in one HTML document that needs no server, script or network; light or dark."""
    names = {name: re.sub(r"\W+", "-", name.lower()) for name in tabs}
    contents = " · ".join(f'<a href="#{at}">{markup(name)}</a>' for name, at in names.items())
    body = "".join(f'<section><h2 id="{names[name]}">{markup(name)}</h2>{tab}</section>' for name, tab in tabs.items())
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{markup(title)}</title><style>{_STYLE}</style>"
    )
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{markup(title)}</h1>'
        f"<nav aria-label='Contents'>{contents}</nav><main>{body}</main></body></html>"
    )


def _in_order(report: ReportRecord, history: Sequence[ReportRecord]) -> list[ReportRecord]:
    by_iteration = {past.iteration: past for past in history} | {report.iteration: report}
    return [by_iteration[index] for index in sorted(by_iteration)]


def _overview(
    report: ReportRecord,
    reports: Sequence[ReportRecord],
    notes: Sequence[str],
    facts: Mapping[str, str],
    evaluated: Sequence[EvaluationRecord],
) -> list[str]:
    before = [past for past in reports if past.iteration < report.iteration]
    shown = {name for name, _, _ in _KEY_METRICS}
    others = {name: value for name, value in sorted(report.metrics.items()) if name not in shown}
    parts = [
        f"<h3>Iteration {report.iteration}, weight version {report.weight_version}</h3>",
        *([_fact_list(facts)] if facts else []),
        *(f"<p>{markup(note)}</p>" for note in notes[:_NOTES_MAX]),
        reward_chart(_curve(reports, "reward"), evaluated),
        _key_table(_with_speed(report.metrics), _with_speed(before[-1].metrics) if before else {}),
    ]
    return parts + ([_other_table(others)] if others else [])


def _fact_list(facts: Mapping[str, str]) -> str:
    """What the run is, as a list of names and values."""
    items = (f"<b>{markup(name)}</b> {markup(value)}" for name, value in facts.items() if value)
    return f'<p style="overflow-wrap:anywhere">{"; ".join(items)}</p>'


def _lengths(report: ReportRecord, reports: Sequence[ReportRecord]) -> list[str]:
    by_iteration = {
        "maximum": _curve(reports, "completions/max_length"),
        "mean": _curve(reports, "completions/mean_length"),
    }
    return [
        charts.histogram(report.lengths, "Length of the responses", "tokens"),
        charts.histogram(report.rewards, "Reward of the responses", "reward"),
        charts.line_chart(by_iteration, "Length by iteration", "iteration", "tokens"),
        *_turns(report, reports),
    ]


def _turns(report: ReportRecord, reports: Sequence[ReportRecord]) -> list[str]:
    """What the policy did with its tools; nothing without turns."""
    if "turns/mean" not in report.metrics:
        return []
    calls = {
        name.removeprefix("turns/calls_").replace("_", " "): value
        for name, value in report.metrics.items()
        if name.startswith("turns/calls_")
    }
    summary = (
        f"{report.metrics['turns/calls']:,.0f} calls of tools took {report.metrics['turns/tool_seconds']:,.1f} s. "
        f"{_shown(report.metrics['turns/failed_share'], '%')} of the responses lost their environment."
    )
    by_iteration = {"maximum": _curve(reports, "turns/max"), "mean": _curve(reports, "turns/mean")}
    return [
        f"<p>{summary}</p>",
        charts.bars(calls, "Calls of tools that were not simply answered", ""),
        charts.line_chart(by_iteration, "Turns by iteration", "iteration", "turns of the policy"),
    ]


def _slots(report: ReportRecord) -> list[str]:
    lost = sum(life.state == "lost" for life in report.lives)
    recovered = sum(life.tokens_recovered for life in report.lives)
    regenerated = sum(life.tokens_regenerated for life in report.lives)
    slots = len({life.slot for life in report.lives})
    summary = (
        f"{len(report.lives):,} processes on {slots:,} slots; {lost:,} lost. Their successors recovered "
        f"{recovered:,} tokens from the journal and generated {regenerated:,} again."
    )
    drawing = timeline(report.lives, report.train_started_at_s, report.train_ended_at_s, "Slots of the iteration")
    return [f"<p>{summary}</p>", *_prefill(report.metrics), drawing]


def _prefill(metrics: Mapping[str, float]) -> list[str]:
    if "rollout/prefill_share" not in metrics:
        return []
    computed, naive = metrics["rollout/prefill_tokens"], metrics["rollout/prefill_tokens_naive"]
    summary = (
        f"Prefill: {computed:,.0f} tokens computed, of {naive:,.0f} without sharing: "
        f"{_shown(metrics['rollout/prefill_share'], '%')}. With long prompts and nothing lost, the best is one part in "
        "num_generations."
    )
    return [f"<p>{summary}</p>"]


def _cost(report: ReportRecord, reports: Sequence[ReportRecord]) -> list[str]:
    metrics = report.metrics
    seconds = _present(
        metrics, {"rollout": "timing_s/rollout", "train": "timing_s/train", "iteration": "timing_s/iteration"}
    )
    usd = _present(metrics, _PAYEES)
    tokens = _present(metrics, {"recovered": "resume/tokens_recovered", "generated again": "resume/tokens_regenerated"})
    spent, points = 0.0, []
    for past in reports:
        spent += past.metrics.get("cost/usd_iter", 0.0)
        points.append((float(past.iteration), spent))
    priced = any("cost/usd_iter" in past.metrics for past in reports)
    return [
        charts.bars(usd, _of_total("Who caused the dollars, at listed prices", metrics), "$"),
        *_purposes(metrics),
        charts.bars(seconds, "Seconds (rollout and training may overlap)", "s"),
        charts.bars(tokens, "Tokens of lost processes", ""),
        charts.line_chart({"spent": points if priced else []}, "Dollars spent so far", "iteration", "dollars"),
        *_per_reward_point(reports),
    ]


def _purposes(metrics: Mapping[str, float]) -> list[str]:
    """What the dollars were spent on."""
    usd = _present(metrics, _PURPOSES)
    total = metrics.get("cost/usd_iter", 0.0)
    rows = [(name, _shown(value, "$"), _shown(value / total, "%") if total else "") for name, value in usd.items()]
    return [
        charts.bars(usd, _of_total("What the dollars were for", metrics), "$"),
        table(("", "dollars", "of the iteration"), rows),
    ]


def _of_total(title: str, metrics: Mapping[str, float]) -> str:
    """The title, with the dollars that the bars below it add up to."""
    return f"{title}: {_shown(metrics['cost/usd_iter'], '$')} in all" if "cost/usd_iter" in metrics else title


def _per_reward_point(reports: Sequence[ReportRecord]) -> list[str]:
    usd = usd_per_reward_point(reports)
    if usd is None:
        return []
    return [f"<p>Since iteration {reports[0].iteration}, a point of mean reward has cost {_shown(usd, '$')}.</p>"]


def _curve(reports: Sequence[ReportRecord], metric: str) -> list[tuple[float, float]]:
    return [(float(past.iteration), past.metrics[metric]) for past in reports if metric in past.metrics]


def _present(metrics: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """The metrics that there are, by their labels, without those that nothing is configured for."""
    return {label: metrics[metric] for label, metric in names.items() if _is_told(metrics, metric)}


def _is_told(metrics: Mapping[str, float], metric: str) -> bool:
    return metric in metrics and not (metric in _OPTIONAL and metrics[metric] == 0)


def _with_speed(metrics: Mapping[str, float]) -> Mapping[str, float]:
    speed = rollout_tokens_per_s(metrics)
    return metrics if speed is None else {**metrics, _SPEED: speed}


def _key_table(metrics: Mapping[str, float], previous: Mapping[str, float]) -> str:
    rows = [
        (label, _shown(metrics[metric], unit), _shown(previous[metric], unit) if metric in previous else "")
        for metric, label, unit in _KEY_METRICS
        if _is_told(metrics, metric)
    ]
    return table(("", "this iteration", "the one before"), rows)


def _other_table(metrics: Mapping[str, float]) -> str:
    rows = [(name, f"{value:.6g}") for name, value in list(metrics.items())[:_METRICS_MAX]]
    more = len(metrics) - len(rows)
    note = f"<p>{more:,} more are in the report.</p>" if more else ""
    return f"<details><summary>Other metrics</summary>{table(('metric', 'value'), rows)}{note}</details>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A table of text; all columns but the first are numbers, unless `numbers` is False."""

    def row(cells: Sequence[str], tag: str) -> str:
        words = _CELL + ";text-align:left"
        styles = [words] + [_NUMBER if numbers else words] * (len(cells) - 1)
        inner = (f'<{tag} style="{s}">{markup(c)}</{tag}>' for c, s in zip(cells, styles, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<table style="border-collapse:collapse;margin:12px 0">{row(header, "th")}{body}</table>'


def _shown(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return str(value)
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "$":
        return charts.amount(value, unit)
    shown = charts.three_digits(value)
    # A count of tokens or bytes says itself what it counts.
    return shown if unit in ("", "tokens", "bytes") else f"{shown} {unit}"


def styled(parts: Sequence[str]) -> str:
    """Pieces of HTML one below the other, in the Deck's font; drawings that follow one another share the width."""
    rows: list[str] = []
    for is_drawing, group in groupby(parts, lambda part: part.startswith("<svg")):
        held = list(group)
        rows += [f'<div style="{_GRID}">{"".join(held)}</div>'] if is_drawing else held
    return f'<div style="{_PAGE}">{"<div style=height:14px></div>".join(rows)}</div>'
