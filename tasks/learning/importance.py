"""Importance weights: corrections for responses that were sampled from another policy than the trainer's.

The engine's log-probs differ from the trainer's for the same weights when kernels, dtypes or quantisation differ, and
more when the weights do. Pure functions of tensors; weights carry no gradient and multiply the policy loss.
"""

import math
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from tasks.learning.config import AlgorithmConfig, TrainerConfig
from tasks.sampling.config import RolloutConfig

ImportanceMode = Literal["token", "sequence-mask"]
# Log-ratios are counted in bins of 1/64, around multiples of it: a ratio read from them is right to a factor of
# exp(1/128), 0.8 %. Beyond the 257 bins on either side of 0, from about -4 to 4, two more count the rest.
BINS_PER_NAT = 64
BINS_PER_SIDE = 4 * BINS_PER_NAT
NUM_BINS = 2 * BINS_PER_SIDE + 3


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


def same_engine(rollout: RolloutConfig, trainer: TrainerConfig, published_dtypes: Collection[str]) -> bool:
    """Whether an engine is known to compute log-probs as the trainer does: our own, all in float32.

    In bfloat16 batch mates change the last bits, and weights that are published in it are not the trainer's. From
    what no worker says and never changes in a run, so that every attempt decides alike.

    Args:
        rollout: The engine and its dtype.
        trainer: Its dtype.
        published_dtypes: Of the run's first weights, as manifests name them ("F32").
    """
    is_exact = {rollout.dtype, trainer.dtype} == {"float32"} and set(published_dtypes) <= {"F32"}
    return rollout.engine in ("torch", "scripted") and is_exact


def importance_mode(algorithm: AlgorithmConfig, *, same_engine: bool) -> ImportanceMode | None:
    """How responses are weighted, None: not at all. "auto" is "token" unless engine and weights are the trainer's.

    With old_logprobs "sampler" the ratio of the loss corrects already: None.
    """
    if algorithm.old_logprobs == "sampler" or algorithm.importance_sampling == "none":
        return None
    if algorithm.importance_sampling != "auto":
        return algorithm.importance_sampling
    return None if same_engine and algorithm.max_staleness == 0 else "token"


def importance_weights(mode: ImportanceMode, ratios: Tensor, cap: float) -> Tensor:
    """The weights [B, T] of `truncated_token_weights` or, with floor 0, of `masked_sequence_weights`."""
    return truncated_token_weights(ratios, cap) if mode == "token" else masked_sequence_weights(ratios, cap)


def over_cap(mode: ImportanceMode, ratios: Tensor, cap: float) -> Tensor:
    """[B, T] bool: where `importance_weights` is not the ratio, of the token or of its response, but the cap or 0."""
    log_ratio = ratios if mode == "token" else ratios.sum(dim=1, keepdim=True).expand_as(ratios)
    return log_ratio > math.log(cap)


def log_ratio_counts(ratios: Tensor, response_mask: Tensor) -> Tensor:
    """How many log-ratios [B, T] inside the mask are in each bin, int64 [NUM_BINS]; counts of parts add up.

    Bin BINS_PER_SIDE + 1 is around 0, the first and the last count what is below or above all others. What is not a
    number counts as 0.
    """
    limit = BINS_PER_SIDE + 1
    scaled = torch.nan_to_num(ratios[response_mask].double() * BINS_PER_NAT).round().clamp(-limit, limit)
    return torch.bincount(scaled.long() + limit, minlength=NUM_BINS)


def ratio_quantile(counts: Sequence[int], fraction: float, smallest: float, largest: float) -> float:
    """The ratio that at least `fraction` of those counted do not exceed, right to a factor of exp(1 / 128).

    Args:
        counts: `log_ratio_counts`, not all 0.
        fraction: Above 0, at most 1.
        smallest: The smallest ratio, exactly; what is below all bins is taken for it.
        largest: The largest, alike.
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
