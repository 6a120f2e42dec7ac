"""Returns and advantages per token, from rewards per token and a critic's values. Pure functions of [B, T] tensors.

Tokens outside the response mask are skipped wherever they are, as if the tokens around them were adjacent.
"""

import torch
from torch import Tensor


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
    running = torch.zeros_like(rewards[:, 0])
    reversed_returns = []
    for column in reversed(range(rewards.shape[1])):
        running = torch.where(response_mask[:, column], rewards[:, column] + gamma * running, running)
        reversed_returns.append(running)
    return torch.stack(reversed_returns[::-1], dim=1).masked_fill(~response_mask, 0.0)


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
    values = values.detach()
    following_value = torch.zeros_like(values[:, 0])
    running = torch.zeros_like(values[:, 0])
    reversed_advantages = []
    for column in reversed(range(values.shape[1])):
        inside = response_mask[:, column]
        delta = rewards[:, column] + gamma * following_value - values[:, column]
        running = torch.where(inside, delta + gamma * gae_lambda * running, running)
        following_value = torch.where(inside, values[:, column], following_value)
        reversed_advantages.append(running)
    outside = ~response_mask
    advantages = torch.stack(reversed_advantages[::-1], dim=1).masked_fill(outside, 0.0)
    return advantages, (advantages + values).masked_fill(outside, 0.0)


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
