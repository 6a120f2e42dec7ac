"""Losses: the loss of each token, and the aggregation of token losses to one number. Pure functions of tensors.

Aggregation has two parts, so that splitting a step into micro-batches never changes its gradient: weights that depend
on one response alone, and one denominator for the whole step, applied to the accumulated gradient at the step's end.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tasks.configuration.algorithm import AlgorithmConfig, KlEstimator, LossAggregation

# The largest log ratio to the old policy, because exp would soon overflow.
LOG_RATIO_MAX = 20.0
# From this log ratio to the reference on, k3 goes on along its tangent.
K3_LOG_RATIO_MAX = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """A policy objective, token by token; all [B, T].

    Attributes:
        loss: To be minimised; differentiable.
        ratio: pi(token) / pi_old(token), detached; for "gspo" the ratio of the whole response.
        clipped_low: True where the lower clip took the gradient away (negative advantage); for "cispo", where it made
            the gradient larger.
        clipped_high: True where the upper clip took the gradient away (positive advantage, or negative under the dual
            clip); for "cispo", where it made the gradient smaller.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


@dataclass(frozen=True)
class TokenLosses:
    """The losses of a micro-batch, token by token; all [B, T], zero (False) outside the response mask.

    Attributes:
        loss: policy.loss, plus kl_coef * kl unless kl_in is "reward"; differentiable.
        policy: The policy objective alone.
        kl: The KL estimate to the reference policy, detached; zeros without one.
    """

    loss: Tensor
    policy: PolicyLoss
    kl: Tensor


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate per token: -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logprobs - old_logprobs).

    The source is PPO (arXiv 1707.06347, equation 7), with the separate bounds of DAPO (arXiv 2503.14476, section 3.1).
    A second bound for negative advantages, c |A| on the loss, is the dual clip (arXiv 1912.09729, equation 5); verl
    always has it, with c = 3. Log ratios are limited to +-20, because exp would soon overflow.

    Args:
        logprobs: [B, T], with gradient.
        old_logprobs: [B, T]; detached here.
        advantages: [B], one per response, or [B, T].
        clip_ratio_low: The lower bound of the ratio, as a distance from 1.
        clip_ratio_high: The upper bound of the ratio, as a distance from 1.
        clip_ratio_c: c, above 1; None for no second bound.
    """
    ratio = _ratio(logprobs, old_logprobs)
    return _clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """GSPO: the clipped surrogate with the ratio of the whole response, (pi(y) / pi_old(y)) ^ (1 / length).

    The source is arXiv 2507.18071, equations 5 and 7, in the per-token form of equations 13 and 14 (GSPO-token): the
    ratio of a token has the response's value and the gradient of the token's log-prob. With one advantage per response
    and equal weights for its tokens, loss and gradient are those of equation 5; with advantages per token they are
    those of GSPO-token.

    Args:
        logprobs: [B, T], with gradient.
        old_logprobs: [B, T]; detached here.
        advantages: [B], one per response, or [B, T].
        response_mask: [B, T] bool.
        clip_ratio_low: The lower bound of the ratio, as a distance from 1; the paper's is 3e-4.
        clip_ratio_high: The upper bound of the ratio, as a distance from 1; the paper's is 4e-4.
    """
    lengths = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    logprobs = logprobs.masked_fill(~response_mask, 0.0)
    difference = (logprobs.detach() - old_logprobs.detach()).masked_fill(~response_mask, 0.0)
    log_ratio = (difference.sum(dim=1, keepdim=True) / lengths).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    ratio = (log_ratio + (logprobs - logprobs.detach())).exp()
    return _clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high, None)


def cispo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> PolicyLoss:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A log pi, so that no token loses its gradient.

    The source is arXiv 2506.13585, equations 4 and 5; the paper has no lower bound (clip_ratio_low 1). Bounds are
    distances from 1, as everywhere here and in verl. TRL's `epsilon_high` is the largest ratio itself for this loss:
    its 5.0 is 4.0 here.

    Args:
        logprobs: [B, T], with gradient.
        old_logprobs: [B, T]; detached here.
        advantages: [B], one per response, or [B, T].
        clip_ratio_low: The lower bound of the ratio, as a distance from 1.
        clip_ratio_high: The upper bound of the ratio, as a distance from 1.
    """
    ratio = _ratio(logprobs.detach(), old_logprobs)
    advantage = _per_token(advantages, ratio)
    return PolicyLoss(
        loss=-ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantage * logprobs,
        ratio=ratio,
        clipped_low=ratio < 1 - clip_ratio_low,
        clipped_high=ratio > 1 + clip_ratio_high,
    )


def reinforce_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """REINFORCE: -A log pi (Williams, 1992). The ratio is only measured. Shapes are those of `cispo_policy_loss`."""
    ratio = _ratio(logprobs.detach(), old_logprobs)
    never = torch.zeros_like(ratio, dtype=torch.bool)
    loss = -_per_token(advantages, ratio) * logprobs
    return PolicyLoss(loss=loss, ratio=ratio, clipped_low=never, clipped_high=never)


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, algorithm: AlgorithmConfig
) -> PolicyLoss:
    """The configured objective, from policy_loss, clip_ratio_low, clip_ratio_high and clip_ratio_c.

    What lies outside the mask, NaN included, reaches neither the loss of a token inside nor any gradient.
    """
    # Filled before the formulas, because the gradient of a NaN is NaN even where its loss is not used.
    logprobs, old_logprobs, advantages = (
        each.masked_fill(~response_mask, 0.0) if each.dim() == 2 else each
        for each in (logprobs, old_logprobs, advantages)
    )
    low, high = algorithm.clip_ratio_low, algorithm.clip_ratio_high
    if algorithm.policy_loss == "gspo":
        return gspo_policy_loss(logprobs, old_logprobs, advantages, response_mask, low, high)
    if algorithm.policy_loss == "cispo":
        return cispo_policy_loss(logprobs, old_logprobs, advantages, low, high)
    if algorithm.policy_loss == "reinforce":
        return reinforce_policy_loss(logprobs, old_logprobs, advantages)
    return clipped_policy_loss(logprobs, old_logprobs, advantages, low, high, algorithm.clip_ratio_c)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None) -> Tensor:
    """The critic's loss per token, [B, T]: max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2.

    This is the loss of OpenAI's implementation of PPO, verl and TRL. Without a clip it is (V - R)^2 / 2.

    Args:
        values: [B, T], with gradient.
        old_values: [B, T], from before the update; detached here.
        returns: [B, T], from `tasks.learning.returns.gae`; detached here.
        value_clip: c, above 0, in units of the reward; None for no clip.
    """
    returns = returns.detach()
    loss = (values - returns).square()
    if value_clip is not None:
        old = old_values.detach()
        near = torch.maximum(torch.minimum(values, old + value_clip), old - value_clip)
        loss = torch.maximum(loss, (near - returns).square())
    return loss / 2


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """The ratio pi / pi_old of each token, [B, T], with the gradient of `logprobs` only."""
    return (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float | None
) -> PolicyLoss:
    advantage = _per_token(advantages, ratio)
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    ratio = ratio.detach()
    clipped_high = (ratio > 1 + clip_ratio_high) & (advantage > 0)
    if clip_ratio_c is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -clip_ratio_c * advantage), loss)
        clipped_high |= (ratio > clip_ratio_c) & (advantage < 0)
    return PolicyLoss(
        loss=loss,
        ratio=ratio,
        clipped_low=(ratio < 1 - clip_ratio_low) & (advantage < 0),
        clipped_high=clipped_high,
    )


def _per_token(advantages: Tensor, like: Tensor) -> Tensor:
    """Reshape advantages [B] or [B, T] to multiply `like`, [B, T], in its dtype."""
    return (advantages[:, None] if advantages.dim() == 1 else advantages).to(like.dtype)


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) from sampled tokens, [B, T].

    The source is Schulman's note "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html). With d =
    reference_logprobs - logprobs: k1 = -d (unbiased; as a loss its expected gradient is zero on policy), k2 = d^2 / 2,
    and k3 = exp(d) - 1 - d (unbiased and never negative; GRPO's choice, arXiv 2402.03300, equation 4).

    There is no clamp, as in TRL. Only where d exceeds 20 is k3 continued along its tangent at 20, because exp would
    soon overflow; its gradient keeps its sign and stays e^20 - 1. verl cuts k3 at 10 and d at 20 instead: a token with
    d above 2.6 or below -11 has no gradient there, so the tokens that strayed most are not drawn back.

    Args:
        logprobs: [B, T], with gradient.
        reference_logprobs: [B, T]; detached here.
        estimator: k1, k2 or k3.
    """
    difference = reference_logprobs.detach() - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    near = difference.clamp(max=K3_LOG_RATIO_MAX)
    beyond = torch.relu(difference - K3_LOG_RATIO_MAX) * math.exp(K3_LOG_RATIO_MAX)
    return near.exp() + beyond - 1 - difference


def token_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    algorithm: AlgorithmConfig,
    reference_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
) -> TokenLosses:
    """The loss of each token before aggregation. What lies outside the mask, NaN included, has no influence.

    Args:
        logprobs: [B, T], of the policy that is trained, with gradient.
        old_logprobs: [B, T], of the policy in the ratio's denominator.
        advantages: [B], or [B, T].
        response_mask: [B, T] bool, True on the tokens that are trained.
        algorithm: The policy loss with its clip bounds, kl_coef, kl_estimator and kl_in are used.
        reference_logprobs: [B, T]; needed when kl_coef > 0 and kl_in is "loss".
        importance_weights: [B, T]; they multiply the policy loss but not the KL; see `tasks.learning.importance`.

    Raises:
        ValueError: There is a KL in the loss, but no reference_logprobs.
    """
    outside = ~response_mask
    policy = policy_loss(logprobs, old_logprobs, advantages, response_mask, algorithm)
    if importance_weights is not None:
        policy = replace(policy, loss=policy.loss * importance_weights.detach().masked_fill(outside, 0.0))
    loss, kl = policy.loss, torch.zeros_like(policy.ratio)
    if reference_logprobs is not None:
        filled, reference = (each.masked_fill(outside, 0.0) for each in (logprobs, reference_logprobs))
        penalty = kl_penalty(filled, reference, algorithm.kl_estimator)
        kl = penalty.detach()
        loss = loss + algorithm.kl_coef * penalty if algorithm.kl_in == "loss" else loss
    elif algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
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
    """The weight of every token of a response in the step's sum, which depends on that response alone.

    The aggregated loss is sum(weight * token loss) / denominator:

    | mode | weight | denominator | source |
    |---|---|---|---|
    | token-mean | 1 | trained tokens of the step | DAPO (arXiv 2503.14476, section 3.3) |
    | seq-mean-token-mean | 1 / length | responses of the step | GRPO (arXiv 2402.03300, equation 3) |
    | seq-mean-token-sum | 1 | responses of the step | REINFORCE |
    | seq-mean-token-sum-norm | 1 / max_completion_length | responses of the step | Dr.GRPO (arXiv 2503.20783) |

    Args:
        lengths: [B] integer, trained tokens per response.
        mode: The aggregation.
        max_completion_length: The run's limit, not the batch's maximum.

    Returns:
        [B] float64.
    """
    if mode == "seq-mean-token-mean":
        return lengths.double().reciprocal().masked_fill(lengths == 0, 0.0)
    weight = 1.0 / max_completion_length if mode == "seq-mean-token-sum-norm" else 1.0
    return torch.full_like(lengths, weight, dtype=torch.float64)


def denominator(mode: LossAggregation, tokens: int, responses: int) -> float:
    """The divisor of the accumulated sum, and so of its gradient, once per optimizer step; see `token_weights`.

    Args:
        mode: The aggregation.
        tokens: The number of trained tokens in all micro-batches of the step.
        responses: The number of responses in all micro-batches of the step, with those that mask_truncated leaves out.

    Raises:
        ValueError: The step has no tokens.
    """
    if tokens < 1 or responses < 1:
        raise ValueError(f"step: {responses} responses with {tokens} tokens; allowed: at least one of each")
    return float(tokens if mode == "token-mean" else responses)
