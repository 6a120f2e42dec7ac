"""Returns: from rewards per token, and values, to what follows each token. Pure functions of [B, T] tensors.

Tokens outside the response mask are passed over wherever they are: what comes after them counts for what came before.
"""

import torch
from torch import Tensor


def token_rewards(rewards: Tensor, response_mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Rewards per token: a response's reward with its last token, minus kl_coef * kl with every token.

    The KL in the reward, as in arXiv 2203.02155 (equation 2), RLOO (arXiv 2402.14740) and REINFORCE++ (arXiv
    2501.03262). The sum over T is the response's reward for estimators that want one number.

    Args:
        rewards: [B].
        response_mask: [B, T] bool, at least one token in every row.
        kl: [B, T], such as `tasks.learning.loss.kl_penalty` of the old policy to the reference; detached here.
        kl_coef: Its weight.

    Returns:
        [B, T] in the dtype of `rewards`, zero outside the mask.

    Raises:
        ValueError: A response without tokens.
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
    """The discounted sum of what follows: G(t) = r(t) + gamma * G(t + 1), [B, T], zero outside the mask."""
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

    delta(t) = r(t) + gamma * V(t + 1) - V(t), with V = 0 after the last token. arXiv 1506.02438, equation 16.
    PPO on language models normalises the advantages over the batch afterwards: `normalised`, with the whole step's.

    Args:
        rewards: [B, T].
        values: [B, T], the critic's when the responses were sampled: V(t) before token t; detached here.
        response_mask: [B, T] bool.
        gamma: Discount per token.
        gae_lambda: From 0 (one step, trusts the critic) to 1 (discounted returns minus values).

    Returns:
        Advantages, and returns (advantage + value: what the critic is to learn), both [B, T], zero outside the mask.
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
    """(value - mean) / (standard deviation + eps), each value counted `weights` times; zero where that is 0 times.

    The standard deviation is the unbiased one (divisor: sum of weights - 1). Values that are all equal give exact
    zeros. Right only for all values of the step together. verl adds 1e-8 to the variance instead.

    Args:
        values: Of any shape, floating.
        weights: In the same shape: a response mask, or the lengths of responses.
        eps: Added to the standard deviation.

    Raises:
        ValueError: Shapes that differ; weights that sum to less than 2.
    """
    if values.shape != weights.shape:
        raise ValueError(f"weights: shape {tuple(weights.shape)}; allowed: {tuple(values.shape)}, that of the values")
    counted = weights > 0
    count = weights.to(values.dtype)
    if float(count.sum()) < 2:
        raise ValueError(f"weights: sum {float(count.sum()):g}; allowed: at least 2 to normalise over")
    # The mean of equal floats may be off by a rounding error, which a small eps would blow up.
    if bool(values[counted].amax() == values[counted].amin()):
        return torch.zeros_like(values)
    centred = (values - (values.masked_fill(~counted, 0.0) * count).sum() / count.sum()).masked_fill(~counted, 0.0)
    spread = ((centred.square() * count).sum() / (count.sum() - 1)).sqrt()
    return centred / (spread + eps)
