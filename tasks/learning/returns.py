"""Returns and advantages per token, from rewards per token and a critic's values. Pure functions of [B, T] tensors.

Tokens outside the response mask are skipped, as if the tokens around the gap were adjacent.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

# The columns that are summed one after another.
_CHUNK = 256


def token_rewards(rewards: Tensor, response_mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Rewards per token: the response's reward at its last token, minus kl_coef * kl at every token.

    This is the KL in the reward, as in arXiv 2203.02155 (equation 2), RLOO (arXiv 2402.14740) and REINFORCE++ (arXiv
    2501.03262). Estimators that need one number per response take the sum over T.

    Args:
        rewards: [B].
        response_mask: [B, T] bool, at least one token in every row.
        kl: [B, T], such as `tasks.learning.loss.kl_penalty` of the old policy to the reference; detached here.
        kl_coef: The weight of the KL.

    Returns:
        [B, T] in the dtype of `rewards`, zero outside the mask.

    Raises:
        ValueError: A response has no tokens.
    """
    if not bool(response_mask.any(dim=1).all()):
        row = int((~response_mask.any(dim=1)).nonzero()[0])
        raise ValueError(f"response_mask: row {row} is empty; allowed: at least one token")
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = (positions * response_mask).argmax(dim=1, keepdim=True)
    placed = torch.zeros(response_mask.shape, dtype=rewards.dtype, device=rewards.device)
    placed.scatter_(1, last, rewards[:, None])
    if kl is not None:
        placed = placed - kl_coef * kl.detach().to(rewards.dtype)
    return placed.masked_fill(~response_mask, 0.0)


def discounted_returns(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """The discounted sum of rewards from each token on, G(t) = r(t) + gamma * G(t + 1), [B, T], 0 outside the mask."""
    return _discounted_sums(rewards, response_mask, gamma)


def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: A(t) = delta(t) + gamma * lambda * A(t + 1).

    Here delta(t) = r(t) + gamma * V(t + 1) - V(t), with V = 0 after the last token (arXiv 1506.02438, equation 16).
    PPO on language models then normalises the advantages over the whole step; see `normalised`.

    Args:
        rewards: [B, T].
        values: [B, T], V(t) before token t from the critic as it was before the step; detached here.
        response_mask: [B, T] bool.
        gamma: The discount per token.
        gae_lambda: From 0 (one step, trusts the critic) to 1 (discounted returns minus values).

    Returns:
        Advantages, and returns (advantage + value, the critic's target), both [B, T], zero outside the mask.
    """
    outside = ~response_mask
    rewards, values = rewards.masked_fill(outside, 0.0), values.detach().masked_fill(outside, 0.0)
    deltas = rewards + gamma * _following(values, response_mask) - values
    advantages = _discounted_sums(deltas, response_mask, gamma * gae_lambda)
    return advantages, (advantages + values).masked_fill(outside, 0.0)


def _following(values: Tensor, response_mask: Tensor) -> Tensor:
    """The value at the next position inside the mask, or 0 after the last one; [B, T]."""
    width = values.shape[1]
    inside = torch.arange(width, device=values.device).masked_fill(~response_mask, width)
    nearest = inside.flip(1).cummin(dim=1).values.flip(1)  # at this position or later
    padded = pad(values, (0, 1))
    return padded.gather(1, pad(nearest[:, 1:], (0, 1), value=width))


def _discounted_sums(terms: Tensor, response_mask: Tensor, factor: float) -> Tensor:
    """S(t) = term(t) + factor * S(t + 1) inside the mask, as if it had no holes; [B, T], 0 outside.

    Time is divided into chunks of _CHUNK columns. Chunks are summed side by side; then, from the last chunk to the
    first, each chunk gets the sum that follows. A row of one chunk has the bits of the recursion; rows of more chunks
    differ from the recursion by rounding. Chunks begin at the first column, so the padding of a row changes no bit.
    """
    size, width = terms.shape
    length = min(_CHUNK, width)
    chunks = -(-width // length)
    # Outside the mask the sum is passed on: the term is 0 and the factor 1.
    spare = (0, chunks * length - width)
    inside = pad(response_mask, spare)
    terms = pad(terms.detach(), spare).masked_fill(~inside, 0.0)
    factors = torch.full_like(terms, factor).masked_fill(~inside, 1.0)
    # [position in the chunk, row, chunk]
    sums, powers = (each.reshape(size, chunks, length).permute(2, 0, 1).contiguous() for each in (terms, factors))
    for position in reversed(range(length - 1)):
        sums[position] += powers[position] * sums[position + 1]
        powers[position] *= powers[position + 1]
    following = torch.zeros_like(sums[0])
    for chunk in reversed(range(chunks - 1)):
        following[:, chunk] = sums[0, :, chunk + 1] + powers[0, :, chunk + 1] * following[:, chunk + 1]
    found = (sums + powers * following).permute(1, 2, 0).reshape(size, -1)[:, :width]
    return found.masked_fill(~response_mask, 0.0)


def normalised(values: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Compute (value - mean) / (standard deviation + eps), each value counted `weights` times; 0 where that is 0.

    The standard deviation is the unbiased one (divisor: sum of weights - 1). Values that are all equal give exact
    zeros. The result is right only if all values of the step are given. verl adds 1e-8 to the variance instead.

    Args:
        values: Floating, of any shape.
        weights: A response mask, or the lengths of responses, in the same shape.
        eps: Added to the standard deviation.

    Raises:
        ValueError: The shapes differ, or the weights sum to less than 2.
    """
    if values.shape != weights.shape:
        raise ValueError(f"weights: shape {tuple(weights.shape)}; allowed: {tuple(values.shape)}, that of the values")
    counted = weights > 0
    count = weights.to(values.dtype)
    if float(count.sum()) < 2:
        raise ValueError(f"weights: sum {float(count.sum()):g}; allowed: at least 2 to normalise over")
    # The mean of equal floats may have a rounding error, which a small eps would blow up.
    if bool(values[counted].amax() == values[counted].amin()):
        return torch.zeros_like(values)
    centred = (values - (values.masked_fill(~counted, 0.0) * count).sum() / count.sum()).masked_fill(~counted, 0.0)
    spread = ((centred.square() * count).sum() / (count.sum() - 1)).sqrt()
    return centred / (spread + eps)
