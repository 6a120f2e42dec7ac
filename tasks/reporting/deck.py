"""The pages of an iteration's Deck: tab name to HTML, drawn from the iteration's report and earlier reports.

They show what a report holds: a missing metric has no row, no point and no bar. This module writes nothing and knows no
Flyte.
"""

import html
import math
from collections.abc import Mapping, Sequence

from storage.records import ReportRecord
from tasks.reporting import charts
from tasks.reporting.costs import usd_per_reward_point
from tasks.reporting.timeline import timeline

# (metric, its name for people, unit)
_KEY_METRICS = (
    ("reward", "mean reward", ""),
    ("reward_std", "standard deviation of the reward", ""),
    ("frac_reward_zero_std", "groups without a learning signal", "%"),
    ("completions/mean_length", "mean length", "tokens"),
    ("completions/max_length", "maximum length", "tokens"),
    ("completions/clipped_ratio", "responses cut at the length limit", "%"),
    ("num_tokens", "tokens generated", "tokens"),
    ("preempt/count", "processes lost", ""),
    ("resume/tokens_recovered", "tokens recovered from the journal", "tokens"),
    ("resume/tokens_regenerated", "tokens generated again", "tokens"),
    ("rollout/prefill_share", "prefill computed, relative to prefill without sharing", "%"),
    ("timing_s/rollout", "rollout", "s"),
    ("timing_s/train", "training", "s"),
    ("timing_s/iteration", "iteration", "s"),
    ("cost/usd_iter", "cost of the iteration", "$"),
    ("cost/usd_rollout", "cost of rollout", "$"),
    ("cost/usd_train", "cost of training", "$"),
    ("cost/usd_per_mtok", "cost per million tokens", "$"),
    ("cost/usd_run", "cost of the run so far", "$"),
    ("kl", "KL to the reference", ""),
    ("entropy", "entropy", ""),
    ("actor/grad_norm", "gradient norm", ""),
    ("actor/pg_loss", "policy loss", ""),
    ("mismatch_kl", "KL between sampler and trainer", ""),
)
# What an iteration's dollars were spent on; together these are all of them.
_PURPOSES = {
    "useful": "cost/usd_useful",
    "wasted": "cost/usd_wasted",
    "starting": "cost/usd_starting",
    "idle": "cost/usd_idle",
    "requests": "cost/usd_requests",
    "egress": "cost/usd_egress",
    "control": "cost/usd_control",
}
_METRICS_MAX = 200
_NOTES_MAX = 8
_PAGE = (
    "font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;font-size:14px;line-height:1.5;"
    "color:#1b1f24;background:#ffffff;max-width:900px;padding:16px"
)
_CELL = "padding:3px 14px 3px 0;border-bottom:1px solid #e3e6ea"
_NUMBER = f"{_CELL};text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"


def render(report: ReportRecord, history: Sequence[ReportRecord], notes: Sequence[str] = ()) -> dict[str, str]:
    """The tabs of the Deck, in order: name to a self-contained piece of HTML without scripts, under 100 kB each.

    Args:
        report: The iteration shown.
        history: Reports of the run in any order; `report` replaces one of its own iteration.
        notes: Sentences that people should read first; the first few are shown.
    """
    reports = _in_order(report, history)
    return {
        "Overview": styled(_overview(report, reports, notes)),
        "Lengths": styled(_lengths(report, reports)),
        "Slots": styled(_slots(report)),
        "Cost": styled(_cost(report, reports)),
    }


def page(title: str, tabs: Mapping[str, str]) -> str:
    """All tabs one below the other in one HTML document that needs no server, script or network."""
    body = "".join(f"<h2>{html.escape(name)}</h2>{tab}" for name, tab in tabs.items())
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title>"
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>"


def _in_order(report: ReportRecord, history: Sequence[ReportRecord]) -> list[ReportRecord]:
    by_iteration = {past.iteration: past for past in history} | {report.iteration: report}
    return [by_iteration[index] for index in sorted(by_iteration)]


def _overview(report: ReportRecord, reports: Sequence[ReportRecord], notes: Sequence[str]) -> list[str]:
    rewards = {"mean reward": _curve(reports, "reward")}
    before = [past for past in reports if past.iteration < report.iteration]
    shown = {name for name, _, _ in _KEY_METRICS}
    others = {name: value for name, value in sorted(report.metrics.items()) if name not in shown}
    parts = [
        f"<h2>Iteration {report.iteration}, weight version {report.weight_version}</h2>",
        *(f"<p>{html.escape(note)}</p>" for note in notes[:_NOTES_MAX]),
        charts.line_chart(rewards, "Reward by iteration", "iteration", "mean reward"),
        _key_table(report.metrics, before[-1].metrics if before else {}),
    ]
    return parts + ([_other_table(others)] if others else [])


def _lengths(report: ReportRecord, reports: Sequence[ReportRecord]) -> list[str]:
    by_iteration = {
        "maximum": _curve(reports, "completions/max_length"),
        "mean": _curve(reports, "completions/mean_length"),
    }
    return [
        charts.histogram(report.lengths, "Length of the responses", "tokens"),
        charts.histogram(report.rewards, "Reward of the responses", "reward"),
        charts.line_chart(by_iteration, "Length by iteration", "iteration", "tokens"),
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
    usd = _present(metrics, {"rollout": "cost/usd_rollout", "train": "cost/usd_train", "iteration": "cost/usd_iter"})
    tokens = _present(metrics, {"recovered": "resume/tokens_recovered", "generated again": "resume/tokens_regenerated"})
    spent, points = 0.0, []
    for past in reports:
        spent += past.metrics.get("cost/usd_iter", 0.0)
        points.append((float(past.iteration), spent))
    priced = any("cost/usd_iter" in past.metrics for past in reports)
    return [
        charts.bars(usd, "Dollars at listed prices", "$"),
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
    return [charts.bars(usd, "What they were for", "$"), table(("", "dollars", "of the iteration"), rows)]


def _per_reward_point(reports: Sequence[ReportRecord]) -> list[str]:
    usd = usd_per_reward_point(reports)
    if usd is None:
        return []
    return [f"<p>Since iteration {reports[0].iteration}, a point of mean reward has cost {_shown(usd, '$')}.</p>"]


def _curve(reports: Sequence[ReportRecord], metric: str) -> list[tuple[float, float]]:
    return [(float(past.iteration), past.metrics[metric]) for past in reports if metric in past.metrics]


def _present(metrics: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    return {label: metrics[metric] for label, metric in names.items() if metric in metrics}


def _key_table(metrics: Mapping[str, float], previous: Mapping[str, float]) -> str:
    rows = [
        (label, _shown(metrics[metric], unit), _shown(previous[metric], unit) if metric in previous else "")
        for metric, label, unit in _KEY_METRICS
        if metric in metrics
    ]
    return table(("", "this iteration", "the one before"), rows)


def _other_table(metrics: Mapping[str, float]) -> str:
    rows = [(name, f"{value:.6g}") for name, value in list(metrics.items())[:_METRICS_MAX]]
    more = len(metrics) - len(rows)
    note = f"<p>{more:,} more are in the report.</p>" if more else ""
    return f"<details><summary>Other metrics</summary>{table(('metric', 'value'), rows)}{note}</details>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text; all columns but the first are numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        styles = [_CELL + ";text-align:left"] + [_NUMBER] * (len(cells) - 1)
        inner = (f'<{tag} style="{s}">{html.escape(c)}</{tag}>' for c, s in zip(cells, styles, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<table style="border-collapse:collapse;margin:12px 0">{row(header, "th")}{body}</table>'


def _shown(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return str(value)
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "tokens":
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    return charts.amount(value, unit) if unit else f"{value:.4g}"


def styled(parts: Sequence[str]) -> str:
    """Pieces of HTML one below the other, in the Deck's font and width."""
    return f'<div style="{_PAGE}">{"<div style=height:14px></div>".join(parts)}</div>'
