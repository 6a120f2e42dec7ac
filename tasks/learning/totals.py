"""Sums over the micro-batches of one optimizer step, and the metrics computed from them.

Totals are sums, not means, so the totals of micro-batches add up to the step's totals under any division. Staleness is
measured here, too: the number of weight versions between the trained policy and the policy that sampled a token.
Importance weights correct for staleness; this module only measures and bounds staleness.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from storage.errors import GleanerError
from storage.records.records import PlanRecord
from tasks.configuration.algorithm import LossAggregation
from tasks.learning.importance import effective_sample_size, log_ratio_counts, log_ratios, ratio_quantile
from tasks.learning.loss import TokenLosses, denominator, kl_penalty

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def _added(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """Add counts of the same bins; () stands for no counts."""
    return tuple(map(operator.add, left, right)) if left and right else left or right


def _added_by_name(left: dict[str, float], right: dict[str, float]) -> dict[str, float]:
    return left | {name: left.get(name, 0.0) + value for name, value in right.items()}


# How two totals become one; fields without a word about it are added.
_REDUCER = "reducer"
_LARGEST, _SMALLEST, _BY_BIN, _BY_NAME = (
    {_REDUCER: max},
    {_REDUCER: min},
    {_REDUCER: _added},
    {_REDUCER: _added_by_name},
)


def _reducer(of: "Field[Any]") -> Callable[[Any, Any], Any]:
    reducer: Callable[[Any, Any], Any] = of.metadata.get(_REDUCER, operator.add)
    return reducer


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sums over trained tokens, unless noted otherwise. The sum of two totals follows from the fields.

    Attributes:
        responses: The ids of the trained responses, in training order.
        left_out: The number of responses of the step that count but are not trained (mask_truncated).
        uncounted: The number of responses of the step that do not count, because environments were lost.
        tokens: The number of trained tokens.
        read: The number of tokens of prompts and responses.
        shared: The number of tokens in `read` that a packed pass leaves out, because an earlier response shares the
            prompt.
        computed: The number of tokens in forward passes, padding included.
        loss: The weighted token losses; the loss is this sum divided by the step's denominator.
        policy_loss: Likewise, without the KL term.
        kl: The KL to the reference policy.
        entropy: In nats.
        ppo_kl: old log-prob - log-prob (k1).
        mismatch_kl: k3 of the sampler's distribution to the trainer's, from both log-probs of each token.
        clipped_low: The number of tokens whose gradient the lower clip took away.
        clipped_high: The number of tokens whose gradient the upper clip took away.
        importance_tokens: The number of tokens with an importance weight: all, or none if nothing is corrected.
        importance: The importance weights.
        importance_square: The squared importance weights.
        importance_clipped: The number of tokens whose ratio (with "sequence-mask", that of the response) exceeds the
            cap, so that their weight is the cap (0).
        ratio_max: The largest probability ratio (a maximum, not a sum).
        log_ratio_counts: The number of ratios pi_trainer / pi_sampler in each bin (`importance.log_ratio_counts`); ()
            stands for none.
        sampler_ratio_min: The smallest ratio pi_trainer / pi_sampler (a minimum).
        sampler_ratio_max: The largest ratio pi_trainer / pi_sampler (a maximum).
        staleness: The trainer's weight version less the weight version that sampled the token.
        staleness_max: The largest staleness (a maximum).
        of_loss: The metrics that a loss of the user's own, or that of pairs, returned, by name.
        of_teacher: The measurements of a teacher's scores, by name (`tasks.learning.distillation.Taught.measured`).
    """

    responses: tuple[int, ...] = ()
    left_out: int = 0
    uncounted: int = 0
    tokens: int = 0
    read: int = 0
    shared: int = 0
    computed: int = 0
    loss: float = 0.0
    policy_loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    ppo_kl: float = 0.0
    mismatch_kl: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    importance_tokens: int = 0
    importance: float = 0.0
    importance_square: float = 0.0
    importance_clipped: float = 0.0
    ratio_max: float = field(default=0.0, metadata=_LARGEST)
    log_ratio_counts: tuple[int, ...] = field(default=(), metadata=_BY_BIN)
    sampler_ratio_min: float = field(default=math.inf, metadata=_SMALLEST)
    sampler_ratio_max: float = field(default=0.0, metadata=_LARGEST)
    staleness: int = 0
    staleness_max: int = field(default=0, metadata=_LARGEST)
    of_loss: dict[str, float] = field(default_factory=dict, metadata=_BY_NAME)
    of_teacher: dict[str, float] = field(default_factory=dict, metadata=_BY_NAME)

    def __add__(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(
            **{each.name: _reducer(each)(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        )

    @property
    def trains_nothing(self) -> bool:
        """Whether the step has responses and trains none of them."""
        return bool(self.left_out or self.uncounted) and not self.tokens

    def denominator(self, mode: LossAggregation) -> float:
        """The divisor of the step's accumulated gradient; ValueError for an empty step.

        Responses that are left out count as responses, as in verl and TRL, and have no tokens. The divisor is 1 for a
        step without trained responses, which has no gradient.
        """
        if self.trains_nothing:
            return 1.0
        return denominator(mode, self.tokens, len(self.responses) + self.left_out)

    def metrics(self, mode: LossAggregation) -> dict[str, float]:
        """The step's metrics under the names of TRL and verl; ValueError for an empty step.

        importance/ess, weight_mean and clipped_frac exist only if tokens are weighted. All metrics are 0 if every
        response is left out.
        """
        divisor, tokens = self.denominator(mode), max(1, self.tokens)
        return {
            "loss": self.loss / divisor,
            "actor/pg_loss": self.policy_loss / divisor,
            "kl": self.kl / tokens,
            "entropy": self.entropy / tokens,
            "actor/ppo_kl": self.ppo_kl / tokens,
            "mismatch_kl": self.mismatch_kl / tokens,
            "clip_ratio/low_mean": self.clipped_low / tokens,
            "clip_ratio/high_mean": self.clipped_high / tokens,
            "clip_ratio/region_mean": (self.clipped_low + self.clipped_high) / tokens,
            "ratio_max": self.ratio_max,
            "num_tokens": float(self.tokens),
            "padding_share": 1 - (self.read - self.shared) / self.computed if self.computed else 0.0,
            "shared_prompt_share": self.shared / self.read if self.read else 0.0,
            "trajectory_staleness": self.staleness / tokens,
            "staleness_max": float(self.staleness_max),
            **self._ratio_metrics(),
            **self._importance_metrics(),
            **{f"loss/{name}": value / tokens for name, value in self.of_loss.items()},
            **{f"teacher/{name}": value / tokens for name, value in self.of_teacher.items()},
        }

    def pair_metrics(self) -> dict[str, float]:
        """The means over pairs of what the loss of pairs returned as metrics; {} for other losses."""
        pairs = len(self.responses) / 2
        return {name: value / pairs for name, value in self.of_loss.items()}

    def _ratio_metrics(self) -> dict[str, float]:
        smallest, largest, counts = self.sampler_ratio_min, self.sampler_ratio_max, self.log_ratio_counts
        names = ("min", *QUANTILES, "max")
        if any(counts):
            quantiles = [ratio_quantile(counts, fraction, smallest, largest) for fraction in QUANTILES.values()]
            values = [smallest, *quantiles, largest]
        else:
            values = [0.0] * len(names)
        return {f"importance/ratio_{name}": value for name, value in zip(names, values, strict=True)}

    def _importance_metrics(self) -> dict[str, float]:
        count = self.importance_tokens
        if not count:
            return {}
        return {
            "importance/ess": effective_sample_size(count, self.importance, self.importance_square),
            "importance/weight_mean": self.importance / count,
            "importance/clipped_frac": self.importance_clipped / count,
        }


def combined(totals: Iterable[StepTotals]) -> StepTotals:
    """The sum of the totals of a step's micro-batches."""
    return functools.reduce(StepTotals.__add__, totals, StepTotals())


@torch.no_grad()
def measure(
    *,
    responses: tuple[int, ...],
    losses: TokenLosses,
    weights: Tensor,
    logprobs: Tensor,
    first_logprobs: Tensor,
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    entropy: Tensor,
    response_mask: Tensor,
) -> StepTotals:
    """The totals of a micro-batch, by one transfer from the device. `weights` is [B, 1]; other tensors are [B, T]."""
    mismatch = kl_penalty(sampler_logprobs, first_logprobs, "k3")
    sampler_ratios = log_ratios(first_logprobs, sampler_logprobs, response_mask)
    sums = {
        "tokens": response_mask,
        "loss": losses.loss * weights,
        "policy_loss": losses.policy.loss * weights,
        "kl": losses.kl,
        "entropy": entropy,
        "ppo_kl": old_logprobs - logprobs,
        "mismatch_kl": mismatch.masked_fill(~response_mask, 0.0),
        "clipped_low": losses.policy.clipped_low,
        "clipped_high": losses.policy.clipped_high,
    }
    extremes = {
        "ratio_max": losses.policy.ratio.max(),
        "sampler_ratio_min": sampler_ratios.masked_fill(~response_mask, math.inf).min().exp(),
        "sampler_ratio_max": sampler_ratios.masked_fill(~response_mask, -math.inf).max().exp(),
    }
    of_loss = losses.policy.metrics
    summed = [value.sum(dtype=torch.float64) for value in (*sums.values(), *of_loss.values())]
    stacked = torch.stack([*summed, *(value.double() for value in extremes.values())])
    numbers = torch.cat([stacked, log_ratio_counts(sampler_ratios, response_mask).double()]).tolist()
    counts = tuple(map(int, numbers[len(stacked) :]))
    their = dict(zip(of_loss, numbers[len(sums) : len(summed)], strict=True))
    values = dict(zip([*sums, *extremes], numbers[: len(sums)] + numbers[len(summed) : len(stacked)], strict=True))
    tokens = int(values.pop("tokens"))
    return StepTotals(responses=responses, tokens=tokens, log_ratio_counts=counts, of_loss=their, **values)


@torch.no_grad()
def measure_importance(weights: Tensor, over_cap: Tensor, response_mask: Tensor) -> StepTotals:
    """The totals of a micro-batch's importance weights, to add to the micro-batch's totals; tensors are [B, T]."""
    inside = weights.double().masked_fill(~response_mask, 0.0)
    clipped = over_cap & response_mask
    sums = torch.stack([value.sum(dtype=torch.float64) for value in (inside, inside.square(), clipped, response_mask)])
    total, squares, number, tokens = sums.tolist()
    return StepTotals(
        importance_tokens=int(tokens), importance=total, importance_square=squares, importance_clipped=number
    )


class TooStaleError(GleanerError, ValueError):
    """An iteration was sampled from older weights than the algorithm allows."""


def check_staleness(plan: PlanRecord, max_staleness: int) -> None:
    """Check that an iteration may be trained on: iteration n trains weight version n.

    Raises:
        TooStaleError: The plan's weight version is newer than n, or more than `max_staleness` older.
    """
    staleness = plan.iteration - plan.weight_version
    if not 0 <= staleness <= max_staleness:
        raise TooStaleError(
            f"iteration {plan.iteration}: it trains weight version {plan.iteration} on tokens of weight version "
            f"{plan.weight_version}; allowed with algorithm.max_staleness {max_staleness}: "
            f"{max(0, plan.iteration - max_staleness)} to {plan.iteration}"
        )


def staleness_totals(weight_versions: npt.NDArray[np.uint32], policy_version: int) -> StepTotals:
    """The staleness totals of tokens sampled from `weight_versions`, [n], when `policy_version` is trained."""
    staleness = policy_version - weight_versions.astype(np.int64)
    return StepTotals(staleness=int(staleness.sum()), staleness_max=int(staleness.max(initial=0)))
