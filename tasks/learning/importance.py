"""Importance weights: corrections for responses that were sampled from another policy than the trainer's.

With equal weights, log-probs of engine and trainer differ if kernels, dtypes or quantisation differ; with different
weights, log-probs differ more. Pure functions of tensors; weights have no gradient and multiply the policy loss.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tasks.learning.correction import ImportanceMode

# Log-ratios are counted in bins of width 1/64 centred at its multiples from -4 to 4, so that a ratio read from them is
# right to a factor of exp(1/128), 0.8 %. Two more bins count everything below and above.
BINS_PER_NAT = 64
BINS_PER_SIDE = 4 * BINS_PER_NAT
NUM_BINS = 2 * BINS_PER_SIDE + 3


def log_ratios(logprobs: Tensor, sampler_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Compute log(pi_trainer / pi_sampler) per token, [B, T], zero outside the mask, without gradient.

    Args:
        logprobs: [B, T], from the trainer, of its policy before the iteration's first optimizer step.
        sampler_logprobs: [B, T], as the engine recorded them.
        response_mask: [B, T] bool.
    """
    return (logprobs.detach() - sampler_logprobs.detach()).masked_fill(~response_mask, 0.0)


def truncated_token_weights(ratios: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(pi_trainer / pi_sampler, cap) for each token.

    The source is Ionides, "Truncated importance sampling" (2008), as applied to differences between engine and trainer
    (fengyao.notion.site/off-policy-rl). TRL calls it "token_truncate".

    Args:
        ratios: [B, T], `log_ratios`.
        cap: The largest weight, at least 1.

    Returns:
        [B, T]; 1 outside the mask, where the log ratio is 0.
    """
    return ratios.clamp(max=math.log(cap)).exp()


def masked_sequence_weights(ratios: Tensor, cap: float, floor: float = 0.0) -> Tensor:
    """The probability ratio of the whole response, repeated for each token; 0 for ratios outside [floor, cap].

    With floor 0 this is TRL's "sequence_mask"; with floor 1 / cap the bounds treat both policies alike. The ratio is a
    product over tokens and strays from 1 as responses grow, so long responses are dropped more often: watch
    importance/clipped_frac.

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


def importance_weights(mode: ImportanceMode, ratios: Tensor, cap: float) -> Tensor:
    """The weights [B, T] of `truncated_token_weights` or, with floor 0, of `masked_sequence_weights`."""
    return truncated_token_weights(ratios, cap) if mode == "token" else masked_sequence_weights(ratios, cap)


def over_cap(mode: ImportanceMode, ratios: Tensor, cap: float) -> Tensor:
    """Where `importance_weights` is not the ratio of the token or its response, but the cap or 0; [B, T] bool."""
    log_ratio = ratios if mode == "token" else ratios.sum(dim=1, keepdim=True).expand_as(ratios)
    return log_ratio > math.log(cap)


def log_ratio_counts(ratios: Tensor, response_mask: Tensor) -> Tensor:
    """The number of log-ratios [B, T] inside the mask in each bin, int64 [NUM_BINS]; counts of parts add up.

    Bin BINS_PER_SIDE + 1 is around 0. The first and the last bin count everything below and above the others. NaN
    counts as 0.
    """
    limit = BINS_PER_SIDE + 1
    scaled = torch.nan_to_num(ratios.double() * BINS_PER_NAT).round().clamp(-limit, limit)
    counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=ratios.device)
    return counts.scatter_add_(0, scaled.long().flatten() + limit, response_mask.flatten().long())


def ratio_quantile(counts: Sequence[int], fraction: float, smallest: float, largest: float) -> float:
    """The quantile of the counted ratios at `fraction`, right to a factor of exp(1 / 128).

    Args:
        counts: `log_ratio_counts`, not all 0.
        fraction: Above 0, at most 1.
        smallest: The exact smallest ratio; the result for a quantile in the first bin.
        largest: The exact largest ratio; the result for a quantile in the last bin.
    """
    rank, reached, number = fraction * sum(counts), 0, 0
    for number, count in enumerate(counts):  # noqa: B007 - the bin that is reached is wanted
        reached += count
        if reached >= rank:
            break
    if number in (0, NUM_BINS - 1):
        return largest if number else smallest
    ratio = math.exp((number - BINS_PER_SIDE - 1) / BINS_PER_NAT)
    return min(max(ratio, smallest), largest)


def effective_sample_size(count: int, total: float, squares: float) -> float:
    """Kish's effective sample size as a fraction of the samples: (sum w)^2 / (n * sum w^2).

    The fraction is 1 for equal weights, 1 / n for a single weight above zero, and 0 for zeros. The arguments are sums,
    because effective sample sizes of micro-batches do not add up to the step's.

    Args:
        count: n, the number of weights in the step.
        total: The sum of the weights, which are not negative.
        squares: The sum of the squared weights.

    Raises:
        ValueError: There are no weights.
    """
    if count < 1:
        raise ValueError("weights: none; allowed: at least one")
    return total**2 / (count * squares) if squares > 0 else 0.0
