"""Importance weights: corrections for responses that were sampled from another policy than the trainer's.

The engine's log-probs differ from the trainer's for the same weights when kernels, dtypes or quantisation differ, and
more when the weights do. Pure functions of tensors; weights carry no gradient and multiply the policy loss.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

QUANTILES = (0.01, 0.5, 0.99)


def log_ratios(logprobs: Tensor, sampler_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """log(pi_trainer / pi_sampler) per token, [B, T], zero outside the mask, without gradient.

    Args:
        logprobs: [B, T] of the trainer for the weights that were sampled from.
        sampler_logprobs: [B, T] as the engine recorded them.
        response_mask: [B, T] bool.
    """
    return (logprobs.detach() - sampler_logprobs.detach()).masked_fill(~response_mask, 0.0)


def truncated_token_weights(ratios: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(pi_trainer / pi_sampler, cap) for each token.

    Ionides, "Truncated importance sampling" (2008), as it is used where engine and trainer differ
    (fengyao.notion.site/off-policy-rl); TRL's "token_truncate".

    Args:
        ratios: [B, T], `log_ratios`.
        cap: The largest weight, at least 1.

    Returns:
        [B, T]; 1 outside the mask, where the log ratio is 0.
    """
    return ratios.clamp(max=math.log(cap)).exp()


def masked_sequence_weights(ratios: Tensor, cap: float, floor: float = 0.0) -> Tensor:
    """The probability ratio of the whole response for each of its tokens, or 0 where it leaves [floor, cap].

    With floor 0, TRL's "sequence_mask"; with floor 1 / cap, bounds that treat both policies alike. A ratio of products
    strays from 1 as responses grow, so long ones are dropped more often: watch `importance_metrics`.

    Args:
        ratios: [B, T], `log_ratios`.
        cap: The largest ratio that is trained, at least 1.
        floor: The smallest ratio that is trained, at most 1.

    Returns:
        [B, T].
    """
    log_ratio = ratios.sum(dim=1, keepdim=True)
    smallest = math.log(floor) if floor > 0 else -math.inf
    kept = (log_ratio <= math.log(cap)) & (log_ratio >= smallest)
    return torch.where(kept, log_ratio, -math.inf).exp().expand_as(ratios)


def importance_weights(mode: Literal["token", "sequence-mask"], ratios: Tensor, cap: float) -> Tensor:
    """The weights [B, T] of `truncated_token_weights` or, with floor 0, of `masked_sequence_weights`."""
    return truncated_token_weights(ratios, cap) if mode == "token" else masked_sequence_weights(ratios, cap)


def effective_sample_size(weights: Tensor) -> float:
    """Kish's effective sample size as a fraction of the samples: (sum w)^2 / (n * sum w^2).

    1 when all weights are equal, 1 / n when one has everything, 0 when all are zero.

    Args:
        weights: [n], not negative; all of the step's, of tokens or of responses.

    Raises:
        ValueError: No weights.
    """
    if weights.numel() == 0:
        raise ValueError("weights: none; allowed: at least one")
    weights = weights.double()
    squares = weights.square().sum()
    return float(weights.sum().square() / (weights.numel() * squares)) if bool(squares > 0) else 0.0


def importance_metrics(
    ratios: Tensor, weights: Tensor, response_mask: Tensor, quantiles: Sequence[float] = QUANTILES
) -> dict[str, float]:
    """How far the sampler was from the trainer, and what the weights leave of the step.

    Quantiles and sample sizes of parts do not add up to those of the step: give all of its responses.

    Args:
        ratios: [B, T], `log_ratios`.
        weights: [B, T].
        response_mask: [B, T] bool, at least one token.
        quantiles: Of the token ratios, from 0 to 1.

    Returns:
        importance_sampling/ratio_q01 (and so on; _min and _max), /ess (of tokens), /frac_masked (tokens of weight 0).
    """
    ratio = ratios[response_mask].double().exp()
    trained = weights[response_mask].double()
    # Sorted by hand: torch.quantile refuses more than 2^24 elements.
    ordered = ratio.sort().values
    found = {f"ratio_q{round(100 * q):02d}": float(ordered[round(q * (len(ordered) - 1))]) for q in quantiles}
    found |= {"ratio_min": float(ordered[0]), "ratio_max": float(ordered[-1])}
    found |= {"ess": effective_sample_size(trained), "frac_masked": float((trained == 0).double().mean())}
    return {f"importance_sampling/{name}": value for name, value in found.items()}
