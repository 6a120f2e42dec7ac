"""The metrics that people read first, in words and with units: an iteration beside the one before.

The Deck and the page of a run show the same rows.
"""

import math
from collections.abc import Iterable, Mapping

from tasks.reporting import charts

Metrics = Mapping[str, float | None]
# (metric, name for people, unit)
_KEY_METRICS = (
    ("reward", "mean reward", ""),
    ("loss", "loss", ""),
    ("rollout/tokens_per_s", "speed of the rollout", "tokens/s"),
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
    ("teacher/kl", "KL to the teacher", ""),
    ("teacher/agreement", "tokens that are the teacher's choice", "%"),
    ("mismatch_kl", "KL between sampler and trainer", ""),
)
METRICS_IN_WORDS = {metric: (label, unit) for metric, label, unit in _KEY_METRICS}
COMPARED = ("", "this iteration", "the one before")
# Zero unless a run configures the feature; a zero has no row, no bar and no chart.
_OPTIONAL = frozenset({"kl", "cost/usd_requests", "cost/usd_egress", "cost/usd_control"})


def costs_anything(history: Iterable[Metrics]) -> bool:
    """Return False if every iteration is free: all prices are 0 or unknown."""
    return any(metrics.get("cost/usd_iter") for metrics in history)


def is_measured(metrics: Metrics, metric: str) -> bool:
    """Return True if the metric has a value, and is not the zero of a feature that the run does not use."""
    return metrics.get(metric) is not None and not (metric in _OPTIONAL and metrics[metric] == 0)


def compared_rows(metrics: Metrics, previous: Metrics, *, with_dollars: bool) -> list[tuple[str, str, str]]:
    """Return (name, value, value of the iteration before) of each key metric that the iteration has.

    Args:
        metrics: Of the iteration.
        previous: Of the iteration before; empty for the first.
        with_dollars: False leaves out every cost.
    """
    return [
        (label, with_unit(metrics.get(metric), unit), with_unit(previous.get(metric), unit))
        for metric, label, unit in _KEY_METRICS
        if is_measured(metrics, metric) and (with_dollars or unit != "$")
    ]


def with_unit(value: float | None, unit: str) -> str:
    """Return the value as text with three digits and the unit; empty text for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "$":
        return charts.amount(value, unit)
    rounded = charts.three_digits(value)
    # The name of a count says whether tokens or bytes are counted.
    return rounded if unit in ("", "tokens", "bytes") else f"{rounded} {unit}"
