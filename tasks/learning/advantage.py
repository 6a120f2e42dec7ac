"""Advantages: one number per response, or per token for REINFORCE++, from rewards. Pure functions of tensors.

Estimators that normalise over the batch would give other numbers for a part of it, so they need the rewards of the
whole step at once, before its first micro-batch is trained.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tasks.configuration.algorithm import NEEDS_WHOLE_BATCH, AlgorithmConfig, RewardScale
from tasks.learning.returns import discounted_returns, gae, normalised, token_rewards


def advantages_of(
    rewards: Tensor,
    lengths: Tensor,
    num_generations: int,
    algorithm: AlgorithmConfig,
    kl: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The advantages of each response: one number [], or one per trained token [length] with "reinforce_plus_plus".

    Args:
        rewards: [B] float64, of whole groups, or of the whole step if the algorithm's `needs_whole_batch` is true.
        lengths: [B] integer, trained tokens per response; 0 for untrained responses, whose rewards still count in the
            mean of their group.
        num_generations: Responses per group.
        algorithm: The estimator, its parameters and kl_coef are used.
        kl: With kl_in "reward", the KL to the reference at every token of each response, [tokens of the response].

    Returns:
        B tensors. They are zero if the estimator normalises over tokens and fewer than two tokens are trained.

    Raises:
        ValueError: The estimator raises it.
    """
    per_token = algorithm.advantage_estimator == "reinforce_plus_plus"
    if algorithm.advantage_estimator in NEEDS_WHOLE_BATCH and int(lengths.sum()) < 2:
        return [rewards.new_zeros((length,) if per_token else ()) for length in lengths.tolist()]
    if per_token:
        return _token_advantages(rewards, lengths, algorithm, kl)
    if kl is not None:
        rewards = rewards - algorithm.kl_coef * torch.stack([row.sum() for row in kl])
    return list(response_advantages(rewards, lengths, num_generations, algorithm))


def response_advantages(rewards: Tensor, lengths: Tensor, num_generations: int, algorithm: AlgorithmConfig) -> Tensor:
    """One advantage per response, by the configured estimator.

    Args:
        rewards: [B] or [groups, num_generations], floating; of the whole step if the algorithm's `needs_whole_batch`
            is true.
        lengths: Trained tokens per response, in the shape of `rewards`; used by "reinforce_plus_plus_baseline".
        num_generations: Responses per group, at least 2.
        algorithm: advantage_estimator, scale_rewards and advantage_eps are used.

    Returns:
        The advantages, in the shape and dtype of `rewards`.

    Raises:
        ValueError: The estimator raises it, or gives advantages per token instead of per response.
    """
    if algorithm.advantage_estimator == "grpo":
        return group_advantages(rewards, num_generations, algorithm.scale_rewards, algorithm.advantage_eps)
    if algorithm.advantage_estimator == "rloo":
        return leave_one_out_advantages(rewards, num_generations)
    if algorithm.advantage_estimator == "reinforce_plus_plus_baseline":
        return reinforce_plus_plus_baseline_advantages(rewards, lengths, num_generations, algorithm.advantage_eps)
    raise ValueError(
        f"advantage_estimator: value {algorithm.advantage_estimator!r}; "
        "allowed: 'grpo', 'rloo', 'reinforce_plus_plus_baseline' for advantages per response"
    )


def group_advantages(rewards: Tensor, num_generations: int, scale: RewardScale, eps: float) -> Tensor:
    """Group-relative advantages: (reward - mean of the group) / (standard deviation of the group + eps).

    The standard deviation is the unbiased one (divisor num_generations - 1). A group whose rewards are all equal gets
    exact zeros. This is GRPO (arXiv 2402.03300, section 4.1.2); without the division it is Dr.GRPO (arXiv 2503.20783,
    section 3.2), and with the standard deviation of all rewards of the batch it is Lite PPO (arXiv 2508.08221).

    Args:
        rewards: [groups * num_generations] or [groups, num_generations], floating; responses of a group are adjacent.
        num_generations: Responses per group, at least 2.
        scale: "group" divides by the group's standard deviation, "batch" by that of all given rewards (which must be
            the whole step's), and "none" does not divide.
        eps: Added to the standard deviation.

    Returns:
        The advantages, in the shape and dtype of `rewards`.

    Raises:
        ValueError: Rewards are not whole groups or not finite, or num_generations is below 2.
    """
    grouped = _grouped(rewards, num_generations)
    # Group by group, because reductions over a matrix round differently as it grows: a group's advantages must not
    # depend on other groups.
    spread = grouped.std(unbiased=True) if scale == "batch" else None
    return torch.cat([_advantages(group, scale, eps, spread) for group in grouped]).reshape(rewards.shape)


def leave_one_out_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """RLOO: the reward minus the mean reward of the group's other responses.

    It equals num_generations / (num_generations - 1) times the reward minus the group's mean (arXiv 2402.14740).
    Arguments, result and errors are those of `group_advantages`; a group of equal rewards gets exact zeros.
    """
    factor = num_generations / (num_generations - 1) if num_generations > 1 else 1.0
    return group_advantages(rewards, num_generations, "none", 0.0) * factor


def reinforce_plus_plus_advantages(
    token_rewards: Tensor, response_mask: Tensor, gamma: float, eps: float
) -> tuple[Tensor, Tensor]:
    """REINFORCE++: discounted returns of each token, normalised over all tokens of the batch.

    The source is arXiv 2501.03262. The return of a token is the reward, given at the last token, minus the KL penalties
    from the token on (`tasks.learning.returns.token_rewards` makes such rewards; the paper's gamma is 1). From it the
    batch's mean is subtracted, and the result is divided by the batch's standard deviation. Long responses count more,
    as in verl and OpenRLHF. The paper's first form, one number per response, is a batch with T = 1.

    Args:
        token_rewards: [B, T], of the whole step.
        response_mask: [B, T] bool.
        gamma: The discount per token.
        eps: Added to the standard deviation.

    Returns:
        Advantages, and returns before normalisation, both [B, T], zero outside the mask.

    Raises:
        ValueError: There are fewer than two tokens.
    """
    returns = discounted_returns(token_rewards, response_mask, gamma)
    return normalised(returns, response_mask, eps), returns


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, lengths: Tensor, num_generations: int, eps: float
) -> Tensor:
    """REINFORCE++ with baseline: the group's mean is subtracted, then the batch is normalised.

    The source is arXiv 2501.03262, "REINFORCE++ w/ Baseline". The mean and the standard deviation of the batch are over
    tokens, as in verl and OpenRLHF: a response counts `lengths` times. With lengths of 1, each response counts once.

    Args:
        rewards: [groups * num_generations] or [groups, num_generations], floating, of the whole step.
        lengths: Tokens per response, in the same shape.
        num_generations: Responses per group, at least 2.
        eps: Added to the standard deviation.

    Returns:
        The advantages, in the shape and dtype of `rewards`.

    Raises:
        ValueError: `group_advantages` or `normalised` raises it.
    """
    return normalised(group_advantages(rewards, num_generations, "none", 0.0), lengths, eps)


def constant_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Whether all rewards of each group are equal, [groups] bool; DAPO's dynamic sampling filters such groups.

    The source is arXiv 2503.14476, section 3.2. Arguments and errors are those of `group_advantages`.
    """
    return _is_constant(_grouped(rewards, num_generations))


def frac_reward_zero_std(rewards: Tensor, num_generations: int) -> float:
    """The fraction of groups whose rewards are all equal, which teach nothing; shapes as in `constant_groups`."""
    return float(constant_groups(rewards, num_generations).double().mean())


def critic_advantages(
    rewards: Tensor,
    lengths: Tensor,
    values: Sequence[Tensor],
    algorithm: AlgorithmConfig,
    kl: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """PPO's advantages per token, normalised over all tokens of the step, and the critic's targets.

    They are computed by `tasks.learning.returns.gae` and then `normalised`, as in verl, TRL and arXiv 2403.17031.

    Args:
        rewards: [B] float64, of the whole step.
        lengths: [B] integer, trained tokens per response; 0 for untrained responses.
        values: The critic's values before the step, [trained tokens] for each response.
        algorithm: gamma, gae_lambda, advantage_eps and kl_coef are used.
        kl: With kl_in "reward", the KL to the reference at every token of each response, [tokens of the response].

    Returns:
        Advantages and returns of each response, [trained tokens] float64 each.
    """
    if not int(lengths.sum()):
        empty = [rewards.new_zeros(0) for _ in lengths]
        return empty, empty
    placed, mask = _placed_rewards(rewards, lengths, algorithm, kl)
    old = pad_sequence([row.to(rewards.dtype) for row in values if len(row)], batch_first=True)
    advantages, returns = gae(placed, old, mask, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda)
    # A single token equals the mean, so its advantage is 0.
    alone = int(mask.sum()) < 2
    advantages = torch.zeros_like(advantages) if alone else normalised(advantages, mask, algorithm.advantage_eps)
    return _by_response(advantages, lengths), _by_response(returns, lengths)


def _token_advantages(
    rewards: Tensor, lengths: Tensor, algorithm: AlgorithmConfig, kl: Sequence[Tensor] | None
) -> list[Tensor]:
    """REINFORCE++ over the trained responses alone: [length] for each of them, and [0] for the others."""
    placed, mask = _placed_rewards(rewards, lengths, algorithm, kl)
    padded, _ = reinforce_plus_plus_advantages(placed, mask, algorithm.gamma, algorithm.advantage_eps)
    return _by_response(padded, lengths)


def _placed_rewards(
    rewards: Tensor, lengths: Tensor, algorithm: AlgorithmConfig, kl: Sequence[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The rewards per token of the trained responses, and their mask; both [trained, longest]."""
    trained = lengths > 0
    counts = lengths[trained]
    mask = torch.arange(int(counts.max()))[None, :] < counts[:, None]
    penalties = None
    if kl is not None:
        penalties = pad_sequence([kl[index] for index in trained.nonzero().flatten().tolist()], batch_first=True)
    return token_rewards(rewards[trained], mask, penalties, algorithm.kl_coef), mask


def _by_response(padded: Tensor, lengths: Tensor) -> list[Tensor]:
    """The rows of the trained responses, each cut to its length, and empty rows for the others."""
    rows = iter(padded)
    # Copies, so that the padding's memory is freed.
    return [next(rows)[:length].clone() if length else padded.new_zeros(0) for length in lengths.tolist()]


def _advantages(group: Tensor, scale: RewardScale, eps: float, batch_spread: Tensor | None) -> Tensor:
    # The mean of equal floats may have a rounding error, which a small eps would blow up.
    if bool(_is_constant(group[None])):
        return torch.zeros_like(group)
    centred = group - group.mean()
    if batch_spread is not None:
        return centred / (batch_spread + eps)
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
