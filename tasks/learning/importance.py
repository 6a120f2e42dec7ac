"""Importance weights: corrections for responses that were sampled from another policy than the trainer's.

The engine's log-probs differ from the trainer's for the same weights when kernels, dtypes or quantisation differ, and
more when the weights do. Pure functions of tensors; weights carry no gradient and multiply the policy loss.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from tasks.learning.config import AlgorithmConfig

ImportanceMode = Literal["token", "sequence-mask"]


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
    strays from 1 as responses grow, so long ones are dropped more often: watch importance/clipped_frac.

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


def importance_mode(algorithm: AlgorithmConfig) -> ImportanceMode | None:
    """How responses are weighted: `importance_sampling`, where "auto" is "token" if old_logprobs is "trainer".

    The trainer cannot know whether an engine's log-probs differ from its own; where they do not, weights are 1. With
    old_logprobs "sampler" the ratio of the loss corrects already: None.
    """
    if algorithm.old_logprobs == "sampler" or algorithm.importance_sampling == "none":
        return None
    return "token" if algorithm.importance_sampling == "auto" else algorithm.importance_sampling


def importance_weights(mode: ImportanceMode, ratios: Tensor, cap: float) -> Tensor:
    """The weights [B, T] of `truncated_token_weights` or, with floor 0, of `masked_sequence_weights`."""
    return truncated_token_weights(ratios, cap) if mode == "token" else masked_sequence_weights(ratios, cap)


def over_cap(mode: ImportanceMode, ratios: Tensor, cap: float) -> Tensor:
    """[B, T] bool: where `importance_weights` is not the ratio, of the token or of its response, but the cap or 0."""
    log_ratio = ratios if mode == "token" else ratios.sum(dim=1, keepdim=True).expand_as(ratios)
    return log_ratio > math.log(cap)


def effective_sample_size(count: int, total: float, squares: float) -> float:
    """Kish's effective sample size as a fraction of the samples: (sum w)^2 / (n * sum w^2).

    1 when all weights are equal, 1 / n when one has everything, 0 when all are zero. Of sums, because the sizes of
    parts do not add up to that of the step.

    Args:
        count: n, all of the step's, tokens or responses.
        total: The sum of their weights, which are not negative.
        squares: The sum of their squares.

    Raises:
        ValueError: No weights.
    """
    if count < 1:
        raise ValueError("weights: none; allowed: at least one")
    return total**2 / (count * squares) if squares > 0 else 0.0
