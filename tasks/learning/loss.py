"""Losses: from named tensors to a loss per token, and how token losses become one number. Pure functions.

Aggregation is in two parts so that splitting a step into micro-batches never changes its gradient: weights that depend
on a response alone, and one denominator for the whole step, applied to the accumulated gradient at its end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.learning.config import AlgorithmConfig, KlEstimator, LossAggregation

LOG_RATIO_MAX = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """A policy objective, token by token; all [B, T].

    Attributes:
        loss: To be minimised; differentiable.
        ratio: pi(token) / pi_old(token), detached.
        clipped_low: True where the lower clip took the gradient away (negative advantage).
        clipped_high: True where the upper clip took it away (positive advantage).
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


@dataclass(frozen=True)
class TokenLosses:
    """What a micro-batch costs, token by token; all [B, T], zero (False) outside the response mask.

    Attributes:
        loss: policy.loss + kl_coef * kl; differentiable.
        policy: The policy objective alone.
        kl: The KL estimate to the reference policy, detached; zeros without one.
    """

    loss: Tensor
    policy: PolicyLoss
    kl: Tensor


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> PolicyLoss:
    """PPO's clipped surrogate, per token: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprobs - old_logprobs).

    PPO (arXiv 1707.06347, equation 7); separate bounds: DAPO (arXiv 2503.14476, section 3.1). There is no second clip
    for negative advantages. Log ratios are limited to +-20, where exp would soon overflow.

    Args:
        logprobs: [B, T], with gradient.
        old_logprobs: [B, T]; detached here.
        advantages: [B], one per response.
        clip_ratio_low: Below which the ratio is clipped, as a distance from 1.
        clip_ratio_high: Above which it is clipped, as a distance from 1.
    """
    ratio = (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    advantage = advantages[:, None].to(ratio.dtype)
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    ratio = ratio.detach()
    return PolicyLoss(
        loss=loss,
        ratio=ratio,
        clipped_low=(ratio < 1 - clip_ratio_low) & (advantage < 0),
        clipped_high=(ratio > 1 + clip_ratio_high) & (advantage > 0),
    )


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) estimated from sampled tokens, [B, T], by Schulman's note "Approximating KL divergence".

    With d = reference_logprobs - logprobs (http://joschu.net/blog/kl-approx.html):
    k1 = -d (unbiased; as a loss its expected gradient is zero on policy), k2 = d^2 / 2, k3 = exp(d) - 1 - d (unbiased
    and never negative; GRPO's choice, arXiv 2402.03300, equation 4).

    Args:
        logprobs: [B, T], with gradient.
        reference_logprobs: [B, T]; detached here.
        estimator: Which of the three.
    """
    difference = reference_logprobs.detach() - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    return difference.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp() - 1 - difference


def token_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    algorithm: AlgorithmConfig,
    reference_logprobs: Tensor | None = None,
) -> TokenLosses:
    """The loss of each token before aggregation.

    Args:
        logprobs: [B, T] of the policy being trained, with gradient.
        old_logprobs: [B, T] of the policy the ratio is taken to.
        advantages: [B].
        response_mask: [B, T] bool, True on the tokens that are trained.
        algorithm: Clip bounds, kl_coef and kl_estimator are used.
        reference_logprobs: [B, T]; needed when kl_coef > 0.

    Raises:
        ValueError: kl_coef > 0 without reference_logprobs.
    """
    policy = clipped_policy_loss(
        logprobs, old_logprobs, advantages, algorithm.clip_ratio_low, algorithm.clip_ratio_high
    )
    outside = ~response_mask
    loss, kl = policy.loss, torch.zeros_like(policy.ratio)
    if reference_logprobs is not None:
        penalty = kl_penalty(logprobs, reference_logprobs, algorithm.kl_estimator)
        loss, kl = loss + algorithm.kl_coef * penalty, penalty.detach()
    elif algorithm.kl_coef > 0:
        raise ValueError(f"kl_coef: value {algorithm.kl_coef}; allowed: 0 without a reference policy")
    return TokenLosses(
        loss=loss.masked_fill(outside, 0.0),
        policy=PolicyLoss(
            loss=policy.loss.detach().masked_fill(outside, 0.0),
            ratio=policy.ratio.masked_fill(outside, 0.0),
            clipped_low=policy.clipped_low & response_mask,
            clipped_high=policy.clipped_high & response_mask,
        ),
        kl=kl.masked_fill(outside, 0.0),
    )


def token_weights(lengths: Tensor, mode: LossAggregation, max_completion_length: int) -> Tensor:
    """The weight of every token of a response in the step's sum; depends on that response alone.

    The aggregated loss is sum(weight * token loss) / denominator:

    | mode | weight | denominator | source |
    |---|---|---|---|
    | token-mean | 1 | tokens of the step | DAPO (arXiv 2503.14476, section 3.3) |
    | seq-mean-token-mean | 1 / length | responses of the step | GRPO (arXiv 2402.03300, equation 3) |
    | seq-mean-token-sum | 1 | responses of the step | REINFORCE |
    | seq-mean-token-sum-norm | 1 / max_completion_length | responses of the step | Dr.GRPO (arXiv 2503.20783) |

    Args:
        lengths: [B] integer, trained tokens per response, at least 1.
        mode: The aggregation.
        max_completion_length: The run's limit, not the batch's maximum.

    Returns:
        [B] float64.
    """
    if mode == "seq-mean-token-mean":
        return lengths.double().reciprocal()
    weight = 1.0 / max_completion_length if mode == "seq-mean-token-sum-norm" else 1.0
    return torch.full_like(lengths, weight, dtype=torch.float64)


def denominator(mode: LossAggregation, tokens: int, responses: int) -> float:
    """What the accumulated sum, and so its gradient, is divided by once per optimizer step; see `token_weights`.

    Args:
        mode: The aggregation.
        tokens: Trained tokens of all micro-batches of the step.
        responses: Responses of all micro-batches of the step.

    Raises:
        ValueError: The step has no tokens.
    """
    if tokens < 1 or responses < 1:
        raise ValueError(f"step: {responses} responses with {tokens} tokens; allowed: at least one of each")
    return float(tokens if mode == "token-mean" else responses)
