"""The charts of a run over its iterations. The Deck and the page of a run draw the same list."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.records.evaluation_records import EvaluationRecord
from tasks.reporting import charts, svg
from tasks.reporting.key_metrics import Metrics, costs_anything, is_measured

_EVALUATED = "val/reward/mean@"
# The rest of the reward functions stand among the Deck's other metrics; a tab stays below 100 kB.
FUNCTIONS_MAX = 6


@dataclass(frozen=True)
class _Chart:
    """A chart of one or more metrics.

    Attributes:
        tab: The tab of the Deck that shows the chart.
        title: The title.
        unit: The label of the vertical axis; values in "%" are multiplied by 100, and "dollars" are for priced runs.
        metrics: The metric of each line, by the line's name in the legend.
    """

    tab: str
    title: str
    unit: str
    metrics: Mapping[str, str]


# Every chart but those of rewards, in the order of the page.
_CHARTS = (
    _Chart("Learning", "Groups without a learning signal", "%", {"groups": "frac_reward_zero_std"}),
    _Chart("Learning", "Responses cut at the length limit", "%", {"responses": "completions/clipped_ratio"}),
    _Chart("Learning", "KL to the reference", "KL", {"KL": "kl"}),
    _Chart("Learning", "KL to the teacher", "KL", {"sampled tokens": "teacher/kl", "heads": "teacher/divergence"}),
    _Chart("Learning", "Tokens that are the teacher's choice", "%", {"tokens": "teacher/agreement"}),
    _Chart("Learning", "KL between sampler and trainer", "KL", {"mismatch": "mismatch_kl"}),
    _Chart("Learning", "Gradient norm", "2-norm", {"norm": "actor/grad_norm"}),
    _Chart("Learning", "Entropy", "nats", {"entropy": "entropy"}),
    _Chart(
        "Lengths",
        "Length by iteration",
        "tokens",
        {"maximum": "completions/max_length", "mean": "completions/mean_length"},
    ),
    _Chart("Lengths", "Turns by iteration", "turns of the policy", {"maximum": "turns/max", "mean": "turns/mean"}),
    _Chart("Cost", "Speed of the rollout", "tokens/s", {"speed": "rollout/tokens_per_s"}),
    _Chart("Cost", "Dollars so far", "dollars", {"dollars": "cost/usd_run"}),
)


def run_charts(
    history: Mapping[int, Metrics],
    evaluated: Sequence[EvaluationRecord],
    width: float = svg.WIDTH,
    tab: str | None = None,
) -> list[str]:
    """Return the charts as SVG: reward, each reward function, then the rest; no chart for an unmeasured metric.

    Without a reward of the training, the loss comes first.

    Args:
        history: Metrics by iteration, ascending.
        evaluated: The evaluations of the run, drawn beside the reward.
        width: The width of a chart, in drawing units.
        tab: The charts of one tab of the Deck; None: all.
    """
    wanted = [chart for chart in (*_rewards(history), *_CHARTS) if tab in (None, chart.tab)]
    drawn = _first_charts(history, evaluated, width) if tab in (None, "Overview") else []
    for chart in wanted:
        if chart.unit == "dollars" and not costs_anything(history.values()):
            continue
        scale = 100.0 if chart.unit == "%" else 1.0
        series = {name: curve(history, metric, scale) for name, metric in chart.metrics.items()}
        measured = any(is_measured(each, metric) for each in history.values() for metric in chart.metrics.values())
        if measured and any(series.values()):
            drawn.append(charts.line_chart(series, chart.title, "iteration", chart.unit, width))
    return drawn


def _first_charts(history: Mapping[int, Metrics], evaluated: Sequence[EvaluationRecord], width: float) -> list[str]:
    loss = curve(history, "loss")
    if not history or any("reward" in metrics for metrics in history.values()):
        return [reward_chart(history, evaluated, width)]
    drawn = [charts.line_chart({"training": loss}, "Loss", "iteration", "mean loss", width)] if loss else []
    return [*drawn, reward_chart(history, evaluated, width)] if evaluated else drawn


def reward_chart(
    history: Mapping[int, Metrics], evaluated: Sequence[EvaluationRecord], width: float = svg.WIDTH
) -> str:
    """Return the chart of the mean reward, with each evaluation at the iteration that samples the evaluated weights."""
    series: dict[str, list[tuple[float, float]]] = {"training": curve(history, "reward")}
    for digest in dict.fromkeys(record.digest for record in evaluated):
        name = "evaluation" if len(series) == 1 else f"evaluation {digest[:6]}"
        of_digest = [record for record in evaluated if record.digest == digest]
        series[name] = sorted(
            (float(record.weight_version), value) for record in of_digest for value in _mean_rewards(record.metrics)
        )
    drawn = {name: points for name, points in series.items() if points}
    return charts.line_chart(drawn, "Reward", "iteration", "mean reward", width)


def curve(history: Mapping[int, Metrics], metric: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """Return (iteration, value times scale) of each iteration with a finite value."""
    values = ((iteration, metrics.get(metric)) for iteration, metrics in history.items())
    return [(float(at), scale * value) for at, value in values if value is not None and math.isfinite(value)]


def _rewards(history: Mapping[int, Metrics]) -> list[_Chart]:
    """Return a chart for each reward function, unless the reward is the value of the only function."""
    names = {name for metrics in history.values() for name in metrics}
    functions = sorted(name for name in names if name.startswith("rewards/") and name.endswith("/mean"))
    if len(functions) == 1 and curve(history, functions[0]) == curve(history, "reward"):
        return []
    titles = (metric.removeprefix("rewards/").removesuffix("/mean") for metric in functions)
    return [
        _Chart("Learning", f"Reward function {title}", "mean value", {title: metric})
        for title, metric in zip(titles, functions[:FUNCTIONS_MAX], strict=False)
    ]


def _mean_rewards(metrics: Mapping[str, float]) -> list[float]:
    """Return the mean reward, without the ends of the interval, whose names have one part more."""
    return [
        value for name, value in metrics.items() if name.startswith(_EVALUATED) and "/" not in name[len(_EVALUATED) :]
    ]
