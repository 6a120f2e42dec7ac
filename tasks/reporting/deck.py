"""The pages of an iteration's Deck: tab name to HTML, drawn from the iteration's report and earlier reports.

They show what a report holds: a missing metric has no row, no point and no bar. This module writes nothing and knows no
Flyte.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from resources.visible_text import markup
from storage.records.evaluation_records import EvaluationRecord
from storage.records.records import ReportRecord
from tasks.reporting import charts
from tasks.reporting.costs import usd_per_reward_point
from tasks.reporting.key_metrics import (
    COMPARED,
    METRICS_IN_WORDS,
    Metrics,
    compared_rows,
    costs_anything,
    is_measured,
    with_unit,
)
from tasks.reporting.metrics_lines import with_speed
from tasks.reporting.run_charts import run_charts
from tasks.reporting.timeline import timeline

# Who caused an iteration's dollars, and what they were spent on; each time, together these are all of them.
_PAYEES = {
    "rollout": "cost/usd_rollout",
    "train": "cost/usd_train",
    "scorers": "cost/usd_score",
    "requests": "cost/usd_requests",
    "egress": "cost/usd_egress",
    "control": "cost/usd_control",
}
_PURPOSES = {
    "useful": "cost/usd_useful",
    "wasted": "cost/usd_wasted",
    "starting": "cost/usd_starting",
    "idle": "cost/usd_idle",
    "scorers": "cost/usd_score",
    "requests": "cost/usd_requests",
    "egress": "cost/usd_egress",
    "control": "cost/usd_control",
}
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
    metrics = {past.iteration: with_speed(past.metrics) for past in reports}
    drawn = {tab: run_charts(metrics, evaluated, tab=tab) for tab in ("Overview", "Learning", "Lengths", "Cost")}
    return {
        "Overview": styled(_overview(report, metrics, notes, facts, drawn["Overview"])),
        "Learning": styled(drawn["Learning"] or ["<p>No iteration has measured how the policy learns.</p>"]),
        "Lengths": styled([*_responses(report), *drawn["Lengths"], *_turns(report)]),
        "Slots": styled(_slots(report)),
        "Cost": styled([*_cost(report, reports), *drawn["Cost"], *_per_reward_point(reports)]),
    }


def page(title: str, tabs: Mapping[str, str]) -> str:
    """Return one HTML document with all tabs, light or dark; the document needs no server, script or network."""
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
    history: Mapping[int, Metrics],
    notes: Sequence[str],
    facts: Mapping[str, str],
    drawn: Sequence[str],
) -> list[str]:
    before = [iteration for iteration in history if iteration < report.iteration]
    previous = history[before[-1]] if before else {}
    with_dollars = costs_anything(history.values())
    others = {
        name: value
        for name, value in sorted(report.metrics.items())
        if name not in METRICS_IN_WORDS and (with_dollars or not name.startswith("cost/usd"))
    }
    parts = [
        f"<h3>Iteration {report.iteration}, weight version {report.weight_version}</h3>",
        *([_fact_list(facts)] if facts else []),
        *(f"<p>{markup(note)}</p>" for note in notes[:_NOTES_MAX]),
        *drawn,
        table(COMPARED, compared_rows(history[report.iteration], previous, with_dollars=with_dollars)),
    ]
    return parts + ([_other_table(others)] if others else [])


def _fact_list(facts: Mapping[str, str]) -> str:
    """What the run is, as a list of names and values."""
    items = (f"<b>{markup(name)}</b> {markup(value)}" for name, value in facts.items() if value)
    return f'<p style="overflow-wrap:anywhere">{"; ".join(items)}</p>'


def _responses(report: ReportRecord) -> list[str]:
    return [
        charts.histogram(report.lengths, "Length of the responses", "tokens"),
        *([charts.histogram(report.rewards, "Reward of the responses", "reward")] if report.rewards else []),
    ]


def _turns(report: ReportRecord) -> list[str]:
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
        f"{with_unit(report.metrics['turns/failed_share'], '%')} of the responses lost their environment."
    )
    return [
        f"<p>{summary}</p>",
        charts.bars(calls, "Calls of tools that were not simply answered", ""),
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
    return [f"<p>{summary}</p>", *_prefill(report.metrics), *_drafts(report.metrics), drawing]


def _prefill(metrics: Mapping[str, float]) -> list[str]:
    if "rollout/prefill_share" not in metrics:
        return []
    computed, naive = metrics["rollout/prefill_tokens"], metrics["rollout/prefill_tokens_naive"]
    summary = (
        f"Prefill: {computed:,.0f} tokens computed, of {naive:,.0f} without sharing: "
        f"{with_unit(metrics['rollout/prefill_share'], '%')}. With long prompts and nothing lost, the best is "
        "one part in num_generations."
    )
    return [f"<p>{summary}</p>"]


def _drafts(metrics: Mapping[str, float]) -> list[str]:
    if "rollout/tokens_per_step" not in metrics:
        return []
    summary = (
        f"Drafts: {metrics['rollout/drafted']:,.0f} verified, {metrics['rollout/accepted']:,.0f} accepted. "
        f"A response got {metrics['rollout/tokens_per_step']:.2f} tokens from a step."
    )
    if (saved_s := metrics.get("rollout/draft_saved_s")) is not None:
        seconds = f"{with_unit(abs(saved_s), 's')} of the members' time"
        summary += f" Drafts saved {seconds}." if saved_s >= 0 else f" Drafts cost {seconds} more than they saved."
    return [f"<p>{summary}</p>"]


def _cost(report: ReportRecord, reports: Sequence[ReportRecord]) -> list[str]:
    """Return what the iteration took; dollars only if an iteration of the run cost any."""
    metrics = report.metrics
    seconds = _present(
        metrics, {"rollout": "timing_s/rollout", "train": "timing_s/train", "iteration": "timing_s/iteration"}
    )
    tokens = _present(metrics, {"recovered": "resume/tokens_recovered", "generated again": "resume/tokens_regenerated"})
    return [
        *(_dollars(metrics) if costs_anything(past.metrics for past in reports) else []),
        charts.bars(seconds, "Seconds (rollout and training may overlap)", "s"),
        charts.bars(tokens, "Tokens of lost processes", ""),
    ]


def _dollars(metrics: Mapping[str, float]) -> list[str]:
    """Return who caused the dollars, and what the dollars bought."""
    usd, total = _present(metrics, _PURPOSES), metrics.get("cost/usd_iter", 0.0)
    rows = [
        (name, with_unit(value, "$"), with_unit(value / total, "%") if total else "") for name, value in usd.items()
    ]
    return [
        charts.bars(_present(metrics, _PAYEES), _of_total("Who caused the dollars, at listed prices", metrics), "$"),
        charts.bars(usd, _of_total("What the dollars were for", metrics), "$"),
        table(("", "dollars", "of the iteration"), rows),
    ]


def _of_total(title: str, metrics: Mapping[str, float]) -> str:
    """The title, with the dollars that the bars below it add up to."""
    return f"{title}: {with_unit(metrics['cost/usd_iter'], '$')} in all" if "cost/usd_iter" in metrics else title


def _per_reward_point(reports: Sequence[ReportRecord]) -> list[str]:
    usd = usd_per_reward_point(reports)
    if not usd:
        return []
    return [f"<p>Since iteration {reports[0].iteration}, a point of mean reward has cost {with_unit(usd, '$')}.</p>"]


def _present(metrics: Metrics, names: Mapping[str, str]) -> dict[str, float]:
    """Return the measured values by label, without zeros of features that the run does not use."""
    return {
        label: value
        for label, metric in names.items()
        if (value := metrics.get(metric)) is not None and is_measured(metrics, metric)
    }


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


def styled(parts: Sequence[str]) -> str:
    """Pieces of HTML one below the other, in the Deck's font; drawings that follow one another share the width."""
    rows: list[str] = []
    for is_drawing, group in groupby(parts, lambda part: part.startswith("<svg")):
        held = list(group)
        rows += [f'<div style="{_GRID}">{"".join(held)}</div>'] if is_drawing else held
    return f'<div style="{_PAGE}">{"<div style=height:14px></div>".join(rows)}</div>'
