"""An evaluation for people: its page of the Deck, with earlier versions and the hardest prompts, and one line."""

from collections.abc import Sequence

from storage.records.evaluation_records import EvaluationRecord
from tasks.reporting import charts
from tasks.reporting.deck import styled, table

_PROMPTS_MAX = 50


def evaluation_tab(record: EvaluationRecord, history: Sequence[EvaluationRecord]) -> str:
    """A self-contained piece of HTML. history: records of the run; those with other settings are left out."""
    series = {earlier.weight_version: earlier for earlier in (*history, record) if earlier.digest == record.digest}
    versions = [series[version] for version in sorted(series)]
    scores = [name for name in sorted(record.metrics) if _is_score(name)]
    curves = {
        name.removeprefix("val/"): [(float(earlier.weight_version), earlier.metrics[name]) for earlier in versions]
        for name in scores
    }
    return styled(
        [
            f"<h3>Weight version {record.weight_version}, evaluation {record.digest}</h3>",
            table(("", "estimate", "95 % from", "to"), [_row(record, name) for name in scores]),
            charts.line_chart(curves, "Scores by weight version", "weight version", "mean over prompts"),
            charts.histogram([prompt.reward for prompt in record.prompts], "Mean reward of the prompts", "reward"),
            _others(record, scores),
            _hardest(record),
        ]
    )


def evaluation_line(record: EvaluationRecord) -> str:
    """An evaluation on one line, without its intervals."""
    metrics = record.metrics
    scores = ", ".join(f"{name.removeprefix('val/')} {metrics[name]:.3f}" for name in metrics if _is_score(name))
    length, clipped = metrics["val/completions/mean_length"], metrics["val/completions/clipped_ratio"]
    return (
        f"weight version {record.weight_version}, evaluation {record.digest} of {len(record.prompts)} prompts: "
        f"{scores}, mean length {length:.1f}, {100 * clipped:.1f} % cut at the limit"
    )


def _is_score(name: str) -> bool:
    return name.startswith(("val/pass@", "val/reward/mean@")) and not name.endswith(("/low", "/high"))


def _row(record: EvaluationRecord, name: str) -> tuple[str, str, str, str]:
    bounds = [record.metrics.get(f"{name}/{bound}") for bound in ("low", "high")]
    low, high = ("" if value is None else f"{value:.4f}" for value in bounds)
    return name.removeprefix("val/"), f"{record.metrics[name]:.4f}", low, high


def _others(record: EvaluationRecord, scores: Sequence[str]) -> str:
    rows = [
        (name.removeprefix("val/"), f"{value:.6g}")
        for name, value in sorted(record.metrics.items())
        if not name.startswith(tuple(scores))
    ]
    return table(("metric", "value"), rows)


def _hardest(record: EvaluationRecord) -> str:
    """The prompts with the lowest mean reward; equal ones in the order of the set."""
    hardest = sorted(record.prompts, key=lambda prompt: prompt.reward)[:_PROMPTS_MAX]
    rows = [
        (each.prompt_id, f"{each.reward:.4g}", f"{each.correct}", f"{each.clipped}", f"{each.length:.1f}")
        for each in hardest
    ]
    grid = table(("prompt", "mean reward", "correct", "cut at the limit", "mean length"), rows)
    return f"<details><summary>The {len(rows)} hardest of {len(record.prompts):,} prompts</summary>{grid}</details>"
