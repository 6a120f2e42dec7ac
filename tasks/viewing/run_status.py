"""The finished iterations of a run: a table for a terminal, and JSON values."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from storage.package_version import VERSION
from storage.records.evaluation_records import EvaluationRecord
from storage.records.failures import FailureRecord
from storage.records.records import ReportRecord
from tasks.reporting.costs import usd_per_reward_point
from tasks.reporting.key_metrics import costs_anything

REWARD, LOSS = ("reward", "reward", "{:.3f}"), ("loss", "loss", "{:.4f}")
COLUMNS = (
    REWARD,
    ("mean length", "completions/mean_length", "{:.1f}"),
    ("max length", "completions/max_length", "{:.0f}"),
    ("tokens", "num_tokens", "{:.0f}"),
    ("recovered", "resume/tokens_recovered", "{:.0f}"),
    ("regenerated", "resume/tokens_regenerated", "{:.0f}"),
    ("losses", "preempt/count", "{:.0f}"),
    ("seconds", "timing_s/iteration", "{:.1f}"),
    ("dollars", "cost/usd_iter", "{:.5f}"),
)
VERSIONS_SHOWN = 3
TURNS_COLUMNS = (
    ("turns", "turns/mean", "{:.1f}"),
    ("calls", "turns/calls", "{:.0f}"),
    ("failed", "turns/failed_share", "{:.1%}"),
)


def table(history: list[ReportRecord]) -> Table:
    """Return a table with one row per iteration: reward, lengths, losses, seconds and, unless all are free, dollars.

    A run without rewards has a column with the loss, unless a program gave none. The bytes of the last weight
    versions stand below.
    """
    with_turns = any("turns/mean" in report.metrics for report in history)
    with_dollars = costs_anything(report.metrics for report in history)
    has_reward, has_loss = (any(name in report.metrics for report in history) for name in ("reward", "loss"))
    columns = [
        LOSS if column is REWARD and not has_reward else column
        for column in (*COLUMNS, *(TURNS_COLUMNS if with_turns else ()))
        if (with_dollars or column[1] != "cost/usd_iter") and (column is not REWARD or has_reward or has_loss)
    ]
    grid = Table("iteration", *(title for title, _, _ in columns), title="committed iterations")
    for report in history:
        cells = [form.format(report.metrics.get(name, float("nan"))) for _, name, form in columns]
        grid.add_row(str(report.iteration), *cells)
    sizes = [(report.weight_version, report.metrics.get("weights/bytes")) for report in history[-VERSIONS_SHOWN:]]
    known = [f"{size:,.0f} (version {version})" for version, size in sizes if size is not None]
    grid.caption = f"bytes of weights: {', '.join(known)}" if known else None
    return grid


def status_data(
    run_url: str,
    history: Sequence[ReportRecord],
    evaluated: Sequence[EvaluationRecord],
    failed: Sequence[FailureRecord],
    stopped: str | None,
) -> dict[str, Any]:
    """What `gleaner status --json` prints; the metrics have the names of docs/guide/metrics.md."""
    return {
        "run_url": run_url,
        "gleaner": VERSION,
        "failures": [asdict(failure) for failure in failed],
        "iterations": [
            {
                "iteration": report.iteration,
                "weight_version": report.weight_version,
                "committed_at_s": report.created_at_s,
                "metrics": report.metrics,
            }
            for report in history
        ],
        "usd_per_reward_point": usd_per_reward_point(history),
        "evaluations": [
            {name: value for name, value in asdict(record).items() if name not in ("prompts", "nonce")}
            for record in evaluated
        ],
        "stopped": stopped,
    }
