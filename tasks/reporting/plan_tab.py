"""The Deck's page about an iteration's plan: decisions, reasons, figures, and the errors of predictions."""

import math
from collections.abc import Mapping, Sequence

from resources.visible_text import markup
from storage.records.planning_records import DecisionRecord
from tasks.reporting import charts
from tasks.reporting.deck import styled, table
from tasks.reporting.key_metrics import METRICS_IN_WORDS

_BYTES_MAX = 90_000
_ROWS_MAX = 24
_COLUMNS_MAX = 6
_TEXT_MAX = 400
_CELL_MAX = 60
# What each decision is about, and the inputs that are rates.
_SUBJECTS = {
    "lengths": "Expected lengths of responses, from",
    "width": "Members of each pool",
    "balance": "Members more or fewer than before",
    "seeding": "The trainer's machines generate first",
    "dispatch": "Groups are dealt",
    "crew": "Kind of crew",
}
_RATES = {
    "usd_per_h": "price of a machine in an hour",
    "losses_per_h": "machines lost in an hour",
    "tool_s_per_token": "seconds of waiting for tools for each token",
}
# Approximate bytes between two parts.
_SPACING = 40


def plan_tab(decisions: Sequence[DecisionRecord], metrics: Mapping[str, float]) -> str:
    """A self-contained piece of HTML, under 100 kB. metrics: the actual values, from the iteration's report."""
    parts: list[str] = []
    left_out, size = 0, 0
    for part in (part for decision in decisions for part in _decision(decision, metrics)):
        if size + len(part.encode()) > _BYTES_MAX:
            left_out += 1
            continue
        parts.append(part)
        size += len(part.encode()) + _SPACING
    if left_out:
        parts.append(f"<p>{left_out:,} more paragraphs and tables do not fit here; the plan has them.</p>")
    return styled(parts or ["<p>Nothing was decided: the plan deals the groups in turn.</p>"])


def _decision(decision: DecisionRecord, metrics: Mapping[str, float]) -> list[str]:
    subject = _SUBJECTS.get(decision.name, decision.name)
    parts = [
        f"<h3>{_text(subject)}: {_text(decision.chosen)}</h3>",
        f"<p>Because: {_text(decision.reason)}</p>",
    ]
    if decision.predicted:
        compared = [
            (_label(name), *_compared(name, value, metrics.get(name))) for name, value in decision.predicted.items()
        ]
        parts.append(_table(("metric", "predicted", "actual", "error"), compared))
    if decision.inputs:
        rows = [(_label(name), _figure(name, value)) for name, value in decision.inputs.items()]
        parts.append(_folded(f"{len(rows):,} inputs", _table(("input", "value"), rows)))
    if decision.alternatives:
        parts.append(_folded(f"{len(decision.alternatives):,} alternatives", _alternatives(decision.alternatives)))
    return parts


def _compared(name: str, predicted: float, actual: float | None) -> tuple[str, str, str]:
    """(predicted, actual, error relative to the actual value), as text."""
    if actual is None:
        return _figure(name, predicted), "not measured", ""
    error = f"{100 * (predicted / actual - 1):+.1f} %" if actual else ""
    return _figure(name, predicted), _figure(name, actual), error


def _alternatives(alternatives: Mapping[str, Mapping[str, float]]) -> str:
    names = list(dict.fromkeys(name for figures in alternatives.values() for name in figures))[:_COLUMNS_MAX]
    rows = [
        (label, *(_figure(name, figures[name]) if name in figures else "" for name in names))
        for label, figures in alternatives.items()
    ]
    return _table(("alternative", *map(_label, names)), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    more = f"<p>{len(rows) - _ROWS_MAX:,} more are in the plan.</p>" if len(rows) > _ROWS_MAX else ""
    return table(_cut(header), [_cut(row) for row in rows[:_ROWS_MAX]]) + more


def _cut(cells: Sequence[str]) -> list[str]:
    return [cell[:_CELL_MAX] for cell in cells]


def _folded(summary: str, inner: str) -> str:
    return f"<details><summary>{summary}</summary>{inner}</details>"


def _label(name: str) -> str:
    """The name of a figure for people; its unit stands with its value."""
    if name in METRICS_IN_WORDS:
        return METRICS_IN_WORDS[name][0]
    owner, _, last = name.rpartition("/")
    last = _RATES.get(last, last.removesuffix("_s") if _unit(name) == "s" else last)
    return f"{owner}: {last}".removeprefix(": ").replace("_", " ")


def _unit(name: str) -> str:
    if name in METRICS_IN_WORDS:
        return METRICS_IN_WORDS[name][1]
    last = name.rpartition("/")[2]
    return "$" if "usd" in last else "s" if last.endswith("_s") or name.startswith("timing_s/") else ""


def _figure(name: str, value: float) -> str:
    return charts.amount(value, _unit(name)) if math.isfinite(value) else str(value)


def _text(text: str) -> str:
    return markup(text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}...")
