"""The chart of the reward: by iteration, with the evaluations on the same axes."""

from collections.abc import Mapping, Sequence

from storage.records.evaluation_records import EvaluationRecord
from tasks.reporting import charts, svg

_EVALUATED = "val/reward/mean@"


def reward_chart(
    rewards: Sequence[tuple[float, float]], evaluated: Sequence[EvaluationRecord], width: float = svg.WIDTH
) -> str:
    """(iteration, mean reward), with the mean reward of each evaluation at the iteration that samples its weights."""
    series: dict[str, list[tuple[float, float]]] = {"training": list(rewards)}
    for digest in dict.fromkeys(record.digest for record in evaluated):
        name = "evaluation" if len(series) == 1 else f"evaluation {digest[:6]}"
        of_digest = [record for record in evaluated if record.digest == digest]
        series[name] = sorted(
            (float(record.weight_version), value) for record in of_digest for value in _mean_rewards(record.metrics)
        )
    drawn = {name: points for name, points in series.items() if points}
    return charts.line_chart(drawn, "Reward", "iteration", "mean reward", width)


def _mean_rewards(metrics: Mapping[str, float]) -> list[float]:
    """The mean reward, without the ends of its interval, whose names go on with another part."""
    return [
        value for name, value in metrics.items() if name.startswith(_EVALUATED) and "/" not in name[len(_EVALUATED) :]
    ]
