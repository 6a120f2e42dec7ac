"""Losses: the loss of each token, and the aggregation of token losses to one number. Pure functions of tensors.

Aggregation has two parts: weights that depend on a single response, and a denominator for the whole step, applied to
the accumulated gradient at the step's end. So the division of a step into micro-batches never changes the gradient.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tasks.configuration.algorithm import AlgorithmConfig, KlEstimator, LossAggregation
from tasks.learning.policy_losses import PolicyLoss, policy_loss

# From this log ratio to the reference on, k3 goes on along its tangent.
K3_LOG_RATIO_MAX = 20.0


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


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) from sampled tokens, [B, T].

    The source is Schulman's note "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html). With d =
    reference_logprobs - logprobs: k1 = -d (unbiased; as a loss its expected gradient is zero on policy), k2 = d^2 / 2,
    and k3 = exp(d) - 1 - d (unbiased and never negative; GRPO's choice, arXiv 2402.03300, equation 4).

    There is no clamp, as in TRL. Only where d exceeds 20 is k3 continued along its tangent at 20, because exp would
    soon overflow; beyond 20 the gradient of k3 keeps its sign and stays e^20 - 1. verl cuts k3 at 10 and d at 20
    instead: a token with d above 2.6 or below -11 has no gradient there, so the tokens that strayed most are not drawn
    back.

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
    """The loss of each token before aggregation. Values outside the mask, NaN included, have no influence.

    Args:
        logprobs: [B, T], of the policy that is trained, with gradient.
        old_logprobs: [B, T], of the policy in the ratio's denominator.
        advantages: [B], or [B, T].
        response_mask: [B, T] bool, True on the tokens that are trained.
        algorithm: The policy loss with its clip bounds, kl_coef, kl_estimator and kl_in are used.
        reference_logprobs: [B, T]; needed when kl_coef > 0 and kl_in is "loss".
        importance_weights: [B, T]; factors of the policy loss but not of the KL; see `tasks.learning.importance`.

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
            metrics={name: value.masked_fill(outside, 0.0) for name, value in policy.metrics.items()},
        ),
        kl=kl.masked_fill(outside, 0.0),
    )


def token_weights(lengths: Tensor, mode: LossAggregation, max_completion_length: int) -> Tensor:
    """The weight of every token of a response in the step's sum; no other response changes the weight.

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
        responses: The number of responses in all micro-batches of the step, responses left out by mask_truncated
            included.

    Raises:
        ValueError: The step has no tokens.
    """
    if tokens < 1 or responses < 1:
        raise ValueError(f"step: {responses} responses with {tokens} tokens; allowed: at least one of each")
    return float(tokens if mode == "token-mean" else responses)
