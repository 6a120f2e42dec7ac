"""One optimizer step: accumulate the gradient of micro-batches, then apply it once.

The sum of weighted token losses is differentiated; the division by the step's denominator comes at the end, so neither
the number nor the order of micro-batches biases the result. Does not know where batches come from.
"""

import math

import torch
from torch import Tensor

from tasks.learning.batching import TokenBatch
from tasks.learning.config import AlgorithmConfig
from tasks.learning.loss import TokenLosses, token_losses, token_weights
from tasks.learning.optimizer import NonFiniteGradient, PolicyOptimizer
from tasks.learning.policy import Policy
from tasks.learning.totals import StepTotals, measure


def accumulate(
    policy: Policy,
    batch: TokenBatch,
    advantages: Tensor,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    max_completion_length: int,
    reference: Policy | None = None,
) -> StepTotals:
    """Add one micro-batch's gradient to the policy's.

    With old_logprobs "trainer" the ratio is to this very forward pass, so it is exactly 1: right while an iteration has
    one optimizer step, and independent of the sampler's rounding.

    Args:
        policy: Its gradients are added to.
        batch: B responses.
        advantages: [B].
        algorithm: The loss.
        temperature: The one the responses were sampled with.
        max_completion_length: The run's limit; used by "seq-mean-token-sum-norm".
        reference: The reference policy; needed when kl_coef > 0, and else only measured.

    Raises:
        NonFiniteGradient: The loss is not finite; names the responses whose loss it is. All gradients are dropped.
        ValueError: Advantages of another number than responses; kl_coef > 0 without a reference.
    """
    if advantages.shape != (len(batch.responses),):
        raise ValueError(f"advantages: shape {tuple(advantages.shape)}; allowed: [{len(batch.responses)}]")
    batch = batch.to(policy.device)
    logprobs, entropy = policy.logprobs(batch, temperature)
    sampler_logprobs = batch.sampler_logprobs.to(logprobs.dtype)
    old_logprobs = logprobs.detach() if algorithm.old_logprobs == "trainer" else sampler_logprobs
    losses = token_losses(
        logprobs,
        old_logprobs,
        advantages.to(policy.device),
        batch.response_mask,
        algorithm=algorithm,
        reference_logprobs=_reference_logprobs(reference, batch, temperature),
    )
    weights = token_weights(batch.lengths, algorithm.loss_agg_mode, max_completion_length)[:, None].to(logprobs.dtype)
    (losses.loss * weights).sum().backward()  # type: ignore[no-untyped-call]
    totals = measure(
        responses=batch.responses,
        losses=losses,
        weights=weights,
        logprobs=logprobs.detach(),
        old_logprobs=old_logprobs,
        sampler_logprobs=sampler_logprobs,
        entropy=entropy,
        response_mask=batch.response_mask,
    )
    if not math.isfinite(totals.loss):
        policy.module.zero_grad(set_to_none=True)
        raise NonFiniteGradient("loss", _non_finite_responses(batch, losses))
    return totals


def apply(optimizer: PolicyOptimizer, totals: StepTotals, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Take the optimizer step for everything accumulated, and return the step's metrics.

    Args:
        optimizer: Of the policy whose gradient was accumulated.
        totals: The sum of what `accumulate` returned since the last step.
        algorithm: The aggregation.

    Raises:
        NonFiniteGradient: Weights and moments are unchanged; names all responses of the step.
        ValueError: Nothing was accumulated.
    """
    outcome = optimizer.step(totals.denominator(algorithm.loss_agg_mode), totals.responses)
    rates = {"actor/grad_norm": outcome.grad_norm, "actor/lr": outcome.learning_rate}
    return totals.metrics(algorithm.loss_agg_mode) | rates


def _reference_logprobs(reference: Policy | None, batch: TokenBatch, temperature: float) -> Tensor | None:
    if reference is None:
        return None
    with torch.no_grad():
        return reference.logprobs(batch, temperature)[0]


def _non_finite_responses(batch: TokenBatch, losses: TokenLosses) -> list[int]:
    finite = torch.isfinite(losses.loss).all(dim=1).tolist()
    return [response for response, is_finite in zip(batch.responses, finite, strict=True) if not is_finite]
