"""Advantages: from the rewards of groups to one number per response. Pure functions of tensors.

Does not know where rewards come from, nor the loss that uses the result.
"""

import torch
from torch import Tensor

from tasks.learning.config import RewardScale


def group_advantages(rewards: Tensor, num_generations: int, scale: RewardScale, eps: float) -> Tensor:
    """Group-relative advantages: (reward - mean of the group) / (standard deviation of the group + eps).

    The standard deviation is the unbiased one (divisor num_generations - 1). A group whose rewards are all equal gets
    exact zeros. GRPO (arXiv 2402.03300, section 4.1.2); without the division, Dr.GRPO (arXiv 2503.20783, section 3.2).

    Args:
        rewards: [groups * num_generations] or [groups, num_generations], floating; responses of a group are adjacent.
        num_generations: Responses per group, at least 2.
        scale: "group" divides by the standard deviation, "none" does not.
        eps: Added to the standard deviation.

    Returns:
        The advantages, in the shape and dtype of `rewards`.

    Raises:
        ValueError: Rewards that are not whole groups, or not finite; num_generations below 2.
    """
    grouped = _grouped(rewards, num_generations)
    # Group by group: reductions over a matrix round differently as it grows, and a group's advantages are its own.
    return torch.cat([_advantages(group, scale, eps) for group in grouped]).reshape(rewards.shape)


def frac_reward_zero_std(rewards: Tensor, num_generations: int) -> float:
    """The fraction of groups whose rewards are all equal and which therefore teach nothing; shapes as above."""
    return float(_is_constant(_grouped(rewards, num_generations)).double().mean())


def _advantages(group: Tensor, scale: RewardScale, eps: float) -> Tensor:
    # The mean of equal floats may be off by a rounding error, which a small eps would blow up.
    if bool(_is_constant(group[None])):
        return torch.zeros_like(group)
    centred = group - group.mean()
    return centred / (group.std(unbiased=True) + eps) if scale == "group" else centred


def _is_constant(grouped: Tensor) -> Tensor:
    return grouped.amax(dim=1) == grouped.amin(dim=1)


def _grouped(rewards: Tensor, num_generations: int) -> Tensor:
    if num_generations < 2:
        raise ValueError(f"num_generations: value {num_generations}; allowed: >= 2 for group-relative advantages")
    whole = rewards.dim() == 1 and rewards.numel() % num_generations == 0
    whole = whole or (rewards.dim() == 2 and rewards.shape[1] == num_generations)
    if not whole or rewards.numel() == 0:
        raise ValueError(
            f"rewards: shape {tuple(rewards.shape)}; "
            f"allowed: [groups * {num_generations}] or [groups, {num_generations}]"
        )
    if not bool(torch.isfinite(rewards).all()):
        index = int((~torch.isfinite(rewards.flatten())).nonzero()[0])
        raise ValueError(f"rewards: value {float(rewards.flatten()[index])} at {index}; allowed: finite numbers")
    return rewards.reshape(-1, num_generations)
