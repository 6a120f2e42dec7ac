"""Advantages: one number per response, or per token, from rewards. Pure functions of tensors.

`tasks.configuration.estimators` has the table of estimators; their functions are here. Estimators that normalise over
the batch would give other numbers for a part of it, so they need the rewards of the whole step at once, before its
first micro-batch is trained.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tasks.configuration.algorithm import AlgorithmConfig, RewardScale
from tasks.learning.returns import discounted_returns, gae, normalised, token_rewards


def advantages_of(
    rewards: Tensor,
    lengths: Tensor,
    num_generations: int,
    algorithm: AlgorithmConfig,
    *,
    kl: Sequence[Tensor] | None = None,
    values: Sequence[Tensor] | None = None,
    counted: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """The advantages of each response by the configured estimator, and the returns if there is one for each token.

    The estimator's function gets the arguments named by its parameters: fields of the algorithm, and
    - per response: `rewards` and `lengths` [groups, num_generations], and `num_generations`. The function returns
      advantages in the shape of `rewards`. Each group is a call of its own with [1, counted responses of the group],
      unless `needs_whole_batch` is true. With `needs_whole_batch`, one call gets the step and `counted`, bool in the
      shape of `rewards`, which is True for responses that count; rewards and advantages elsewhere have no meaning.
      `counted` is None if every response counts.
    - per token: `token_rewards`, `response_mask` and `values`, [trained responses, T]. The function returns advantages
      and returns, both [trained responses, T].

    Args:
        rewards: [B] float64, of whole groups, or of the whole step if the algorithm's `needs_whole_batch` is true.
        lengths: [B] integer, trained tokens per response; 0 for untrained responses, whose rewards still count in the
            mean of their group.
        num_generations: Responses per group.
        algorithm: The estimator, the fields that it reads, and kl_coef are used.
        kl: With kl_in "reward", the KL to the reference at every token of each response, [tokens of the response].
        values: The critic's values before the step, [trained tokens] for each response, if the estimator needs them.
        counted: [B] bool, the responses that count (`tasks.learning.shaping.counted_responses`); None if every response
            counts. Responses that do not count have length 0 and advantage 0.

    Returns:
        B tensors of advantages, each a number [] or a value per trained token [length]; and B tensors of returns
        [length], or None for an estimator with a number per response.

    Raises:
        ValueError: The estimator cannot be loaded or raises it, or returns another shape or numbers that are not
            finite.
    """
    if algorithm.estimator.per_token:
        return _token_advantages(rewards, lengths, algorithm, kl, values)
    if kl is not None:
        rewards = rewards - algorithm.kl_coef * torch.stack([row.sum() for row in kl])
    if counted is None:
        counted = torch.ones_like(rewards, dtype=torch.bool)
    rewards, lengths, counted = (each.reshape(-1, num_generations) for each in (rewards, lengths, counted))
    return list(_response_advantages(rewards, lengths, counted, algorithm)), None


def _response_advantages(rewards: Tensor, lengths: Tensor, counted: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """The advantages [B] of [groups, num_generations]; with the scope "group", each group is a call of its own."""
    found = torch.zeros_like(rewards)
    if algorithm.needs_whole_batch or algorithm.estimator.scope == "response":
        if bool(counted.any()):
            whole = _checked_call(algorithm, rewards, lengths, None if bool(counted.all()) else counted)
            found = whole.masked_fill(~counted, 0.0)
        return found.flatten()
    for row, its_rewards, its_lengths, its_counted in zip(found, rewards, lengths, counted, strict=True):
        if bool(its_counted.any()):
            row[its_counted] = _checked_call(algorithm, its_rewards[its_counted][None], its_lengths[its_counted][None])[
                0
            ]
    return found.flatten()


def _checked_call(
    algorithm: AlgorithmConfig, rewards: Tensor, lengths: Tensor, counted: Tensor | None = None
) -> Tensor:
    offered = {"rewards": rewards, "lengths": lengths, "num_generations": rewards.shape[1], "counted": counted}
    found = _called(algorithm, offered)
    name = f"algorithm.advantage_estimator: {algorithm.advantage_estimator!r} returned"
    if not isinstance(found, Tensor) or found.shape != rewards.shape or not found.is_floating_point():
        what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(f"{name} {what}; allowed: a tensor of floating numbers {tuple(rewards.shape)}, as the rewards")
    finite = torch.isfinite(found) if counted is None else torch.isfinite(found) | ~counted
    if not bool(finite.all()):
        raise ValueError(f"{name} {float(found[~finite][0])}; allowed: finite numbers")
    return found.detach().to(rewards)


def _called(algorithm: AlgorithmConfig, offered: dict[str, Any]) -> Any:
    """Call the estimator's function with the offered arguments that its parameters name."""
    estimator = algorithm.estimator
    function = estimator.load()
    offered = offered | {name: getattr(algorithm, name) for name in estimator.reads}
    return function(**{name: offered[name] for name in inspect.signature(function).parameters if name in offered})


def equal_advantages(rewards: Tensor) -> Tensor:
    """An advantage of 1 for each response, in the shape of `rewards`: examples have no rewards, and count alike."""
    return torch.ones_like(rewards)


def weights_of_chosen(rewards: Tensor, lengths: Tensor) -> Tensor:
    """The weight of a chosen token's negative log-likelihood in the loss of its pair, for a mean over chosen tokens.

    Args:
        rewards: [pairs, 2], of the whole step; not read.
        lengths: [pairs, 2], tokens per response; the chosen response is the first of a pair.

    Returns:
        [pairs, 2] in the dtype of `rewards`: pairs / chosen tokens, and 0 for rejected responses.
    """
    found = torch.zeros_like(rewards)
    found[:, 0] = len(lengths) / lengths[:, 0].sum()
    return found


def group_advantages(
    rewards: Tensor,
    num_generations: int,
    scale_rewards: RewardScale,
    advantage_eps: float,
    counted: Tensor | None = None,
) -> Tensor:
    """Group-relative advantages: (reward - mean) / (standard deviation of the group + advantage_eps).

    The standard deviation is the unbiased one (divisor num_generations - 1). A group whose rewards are all equal gets
    exact zeros. This is GRPO (arXiv 2402.03300, section 4.1.2); without the division it is Dr.GRPO (arXiv 2503.20783,
    section 3.2), and with the standard deviation of all rewards of the batch it is Lite PPO (arXiv 2508.08221).

    Args:
        rewards: [groups * num_generations] or [groups, num_generations], floating; responses of a group are adjacent.
        num_generations: Responses per group, at least 2.
        scale_rewards: "group" divides by the group's standard deviation, "batch" by that of all given rewards (which
            must be the whole step's), and "none" does not divide.
        advantage_eps: Added to the standard deviation.
        counted: bool, in the shape of `rewards`: True for responses that count. A group may have no such response.
            None: every response counts.

    Returns:
        The advantages, in the shape and dtype of `rewards`; 0 for responses that do not count.

    Raises:
        ValueError: Rewards are not whole groups or not finite, or num_generations is below 2.
    """
    grouped = _grouped(rewards, num_generations)
    exists = torch.ones_like(grouped, dtype=torch.bool) if counted is None else counted.reshape(grouped.shape)
    spread = (grouped if counted is None else grouped[exists]).std(unbiased=True) if scale_rewards == "batch" else None
    found = torch.zeros_like(grouped)
    # Group by group, because reductions over a matrix round differently as it grows: a group's advantages must not
    # depend on other groups.
    for row, group, its_own in zip(found, grouped, exists, strict=True):
        if bool(its_own.any()):
            row[its_own] = _advantages(group[its_own], scale_rewards, advantage_eps, spread)
    return found.reshape(rewards.shape)


def leave_one_out_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """RLOO: the reward minus the mean reward of the group's other responses.

    The result equals num_generations / (num_generations - 1) times the reward minus the group's mean (arXiv
    2402.14740). Arguments, result and errors are those of `group_advantages`; a group of equal rewards gets exact
    zeros.
    """
    factor = num_generations / (num_generations - 1) if num_generations > 1 else 1.0
    return group_advantages(rewards, num_generations, "none", 0.0) * factor


def reinforce_plus_plus_advantages(
    token_rewards: Tensor, response_mask: Tensor, gamma: float, advantage_eps: float
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
        advantage_eps: Added to the standard deviation.

    Returns:
        Advantages, and returns before normalisation, both [B, T], zero outside the mask. The advantage of a single
        token is 0.
    """
    returns = discounted_returns(token_rewards, response_mask, gamma)
    return _normalised_or_zero(returns, response_mask, advantage_eps), returns


def critic_advantages(
    token_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    gamma: float,
    gae_lambda: float,
    advantage_eps: float,
) -> tuple[Tensor, Tensor]:
    """PPO's advantages per token, normalised over all tokens of the step, and the critic's targets.

    Advantages come from `tasks.learning.returns.gae` and are then `normalised`, as in verl, TRL and arXiv 2403.17031.

    Args:
        token_rewards: [B, T], of the whole step.
        response_mask: [B, T] bool.
        values: [B, T], the critic's values before the step.
        gamma: The discount per token.
        gae_lambda: From 0 (trusts the critic) to 1 (trusts the rewards).
        advantage_eps: Added to the standard deviation.

    Returns:
        Advantages and returns, both [B, T], zero outside the mask. The advantage of a single token is 0.
    """
    advantages, returns = gae(token_rewards, values, response_mask, gamma=gamma, gae_lambda=gae_lambda)
    return _normalised_or_zero(advantages, response_mask, advantage_eps), returns


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, lengths: Tensor, num_generations: int, advantage_eps: float, counted: Tensor | None = None
) -> Tensor:
    """REINFORCE++ with baseline: the group's mean is subtracted, then the batch is normalised.

    The source is arXiv 2501.03262, "REINFORCE++ w/ Baseline". The mean and the standard deviation of the batch are over
    tokens, as in verl and OpenRLHF: a response counts `lengths` times. With lengths of 1, each response counts once.

    Args:
        rewards: [groups * num_generations] or [groups, num_generations], floating, of the whole step.
        lengths: Tokens per response, in the same shape.
        num_generations: Responses per group, at least 2.
        advantage_eps: Added to the standard deviation.
        counted: As in `group_advantages`; the lengths of other responses are 0.

    Returns:
        The advantages, in the shape and dtype of `rewards`; zeros if `lengths` sum to less than 2.

    Raises:
        ValueError: `group_advantages` or `normalised` raises it.
    """
    centred = group_advantages(rewards, num_generations, "none", 0.0, counted)
    return _normalised_or_zero(centred, lengths, advantage_eps)


def constant_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Whether all rewards of each group are equal, [groups] bool; DAPO's dynamic sampling filters such groups.

    The source is arXiv 2503.14476, section 3.2. Arguments and errors are those of `group_advantages`.
    """
    return _is_constant(_grouped(rewards, num_generations))


def frac_reward_zero_std(rewards: Tensor, num_generations: int) -> float:
    """The fraction of groups whose rewards are all equal, which teach nothing; shapes as in `constant_groups`."""
    return float(constant_groups(rewards, num_generations).double().mean())


def _token_advantages(
    rewards: Tensor,
    lengths: Tensor,
    algorithm: AlgorithmConfig,
    kl: Sequence[Tensor] | None,
    values: Sequence[Tensor] | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Advantages and returns of the trained responses, [length] for each of them, and [0] for the others."""
    if not int(lengths.sum()):
        empty = [rewards.new_zeros(0) for _ in lengths]
        return empty, empty
    placed, mask = _placed_rewards(rewards, lengths, algorithm, kl)
    offered = {"token_rewards": placed, "response_mask": mask}
    if values is not None:
        offered["values"] = pad_sequence([row.to(rewards.dtype) for row in values if len(row)], batch_first=True)
    advantages, returns = _called(algorithm, offered)
    return _by_response(advantages, lengths), _by_response(returns, lengths)


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


def _normalised_or_zero(values: Tensor, weights: Tensor, eps: float) -> Tensor:
    """`normalised`, or zeros if fewer than two values are counted: a single one equals the mean."""
    return normalised(values, weights, eps) if int(weights.sum()) >= 2 else torch.zeros_like(values)


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
