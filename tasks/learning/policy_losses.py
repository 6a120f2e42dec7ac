"""Policy losses: the loss of a token from its log-prob and advantage. Pure functions of tensors.

`tasks.configuration.losses` has the table of losses; the functions are here. A loss of the user's own takes a
`LossInputs` and returns a `LossOutputs`.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tasks.configuration.algorithm import AlgorithmConfig

# The largest log ratio to the old policy, because exp would soon overflow.
LOG_RATIO_MAX = 20.0
_METRIC = re.compile("[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a policy loss may read of B responses, padded to T tokens.

    All tensors are on the policy's device. Outside the mask log-probs and advantages are 0. B and T differ from call to
    call, even for the tokens of one response, so a loss must not depend on B or T.

    Attributes:
        logprobs: [B, T] float32 (float64 for a float64 policy), of the policy that is trained, with gradient.
        old_logprobs: [B, T], of the policy in the ratio's denominator; the dtype of `logprobs`, no gradient.
        advantages: [B], one per response, or [B, T]; floating.
        response_mask: [B, T] bool, True on the tokens that are trained.
        clip_ratio_low: The lower bound of the ratio, as a distance from 1.
        clip_ratio_high: The upper bound of the ratio, as a distance from 1.
        clip_ratio_c: The bound of the ratio for negative advantages, above 1; None for no bound.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    response_mask: Tensor
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float | None

    @property
    def token_advantages(self) -> Tensor:
        """The advantages as [B, T] or [B, 1], in the dtype of `logprobs`."""
        return _per_token(self.advantages, self.logprobs)


@dataclass(frozen=True)
class LossOutputs:
    """A policy loss, token by token; all [B, T].

    Attributes:
        loss: To be minimised; floating and differentiable.
        ratio: pi(token) / pi_old(token), detached; for "gspo" the ratio of the whole response. None: of each token,
            from its log-probs.
        clipped_low: bool, True where the lower clip took the gradient away (negative advantage); for "cispo", where it
            made the gradient larger. None: nowhere.
        clipped_high: bool, True where the upper clip took the gradient away (positive advantage, or negative under the
            dual clip); for "cispo", where it made the gradient smaller. None: nowhere.
        metrics: Further values by name (small letters, digits and _). The step reports the mean of each over its
            trained tokens as `loss/<name>`.
    """

    loss: Tensor
    ratio: Tensor | None = None
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyLoss:
    """The outputs of a policy loss with nothing left out; all [B, T], as in `LossOutputs`."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate per token: -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logprobs - old_logprobs).

    The source is PPO (arXiv 1707.06347, equation 7), with the separate bounds of DAPO (arXiv 2503.14476, section 3.1).
    A second bound for negative advantages, c |A| on the loss, is the dual clip (arXiv 1912.09729, equation 5); verl
    always has it, with c = 3. Log ratios are limited to +-20, because exp would soon overflow.

    Args:
        logprobs: [B, T], with gradient.
        old_logprobs: [B, T]; detached here.
        advantages: [B], one per response, or [B, T].
        clip_ratio_low: The lower bound of the ratio, as a distance from 1.
        clip_ratio_high: The upper bound of the ratio, as a distance from 1.
        clip_ratio_c: c, above 1; None for no second bound.
    """
    ratio = _ratio(logprobs, old_logprobs)
    return _clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """GSPO: the clipped surrogate with the ratio of the whole response, (pi(y) / pi_old(y)) ^ (1 / length).

    The source is arXiv 2507.18071, equations 5 and 7, in the per-token form of equations 13 and 14 (GSPO-token): the
    ratio of a token has the response's value and the gradient of the token's log-prob. With one advantage per response
    and equal weights for its tokens, loss and gradient are those of equation 5; with advantages per token, loss and
    gradient are GSPO-token's.

    Args:
        logprobs: [B, T], with gradient.
        old_logprobs: [B, T]; detached here.
        advantages: [B], one per response, or [B, T].
        response_mask: [B, T] bool.
        clip_ratio_low: The lower bound of the ratio, as a distance from 1; the paper's is 3e-4.
        clip_ratio_high: The upper bound of the ratio, as a distance from 1; the paper's is 4e-4.
    """
    lengths = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    logprobs = logprobs.masked_fill(~response_mask, 0.0)
    difference = (logprobs.detach() - old_logprobs.detach()).masked_fill(~response_mask, 0.0)
    log_ratio = (difference.sum(dim=1, keepdim=True) / lengths).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    ratio = (log_ratio + (logprobs - logprobs.detach())).exp()
    return _clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high, None)


def cispo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> PolicyLoss:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A log pi, so that no token loses its gradient.

    The source is arXiv 2506.13585, equations 4 and 5; the paper has no lower bound (clip_ratio_low 1). Bounds are
    distances from 1, as everywhere here and in verl. TRL's `epsilon_high` is the largest ratio itself for this loss:
    its 5.0 is 4.0 here.

    Args:
        logprobs: [B, T], with gradient.
        old_logprobs: [B, T]; detached here.
        advantages: [B], one per response, or [B, T].
        clip_ratio_low: The lower bound of the ratio, as a distance from 1.
        clip_ratio_high: The upper bound of the ratio, as a distance from 1.
    """
    ratio = _ratio(logprobs.detach(), old_logprobs)
    advantage = _per_token(advantages, ratio)
    return PolicyLoss(
        loss=-ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantage * logprobs,
        ratio=ratio,
        clipped_low=ratio < 1 - clip_ratio_low,
        clipped_high=ratio > 1 + clip_ratio_high,
    )


def reinforce_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """REINFORCE: -A log pi (Williams, 1992). The ratio is only measured. Shapes are those of `cispo_policy_loss`."""
    ratio = _ratio(logprobs.detach(), old_logprobs)
    never = torch.zeros_like(ratio, dtype=torch.bool)
    loss = -_per_token(advantages, ratio) * logprobs
    return PolicyLoss(loss=loss, ratio=ratio, clipped_low=never, clipped_high=never)


def likelihood_loss(logprobs: Tensor, old_logprobs: Tensor) -> PolicyLoss:
    """The negative log-likelihood of an example's tokens, -log pi. Shapes are those of `cispo_policy_loss`."""
    ratio = _ratio(logprobs.detach(), old_logprobs)
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(loss=-logprobs, ratio=ratio, clipped_low=never, clipped_high=never)


def preference_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    beta: float,
    label_smoothing: float,
    rpo_alpha: float,
) -> PolicyLoss:
    """DPO: -log sigmoid(m) of each pair, where m is the margin by which the policy prefers the chosen response.

    The source is arXiv 2305.18290, equation 7, with m = beta (log ratio of the chosen response to the reference - that
    of the rejected one). With label smoothing e the loss is ((1 - e) * -log sigmoid(m) - e * -log sigmoid(-m)) /
    (1 - 2 e) (robust DPO, arXiv 2403.00409; TRL's loss_type "robust"). rpo_alpha times the negative log-likelihood of
    the chosen tokens is added (arXiv 2404.19733, equation 1; TRL's loss_type "sft" with a weight).

    Args:
        logprobs: [B, T], with gradient; rows 2 k and 2 k + 1 are the chosen and the rejected response of a pair.
        old_logprobs: [B, T], of the reference; detached here.
        advantages: [B], for chosen responses the weight of a token's negative log-likelihood.
        response_mask: [B, T] bool; the first token of each response is inside.
        beta: How strongly the reference holds the policy, above 0.
        label_smoothing: From 0 to below 0.5.
        rpo_alpha: At least 0.

    Returns:
        A loss that is the pair's at the first token of both responses, and 0 elsewhere, so that a mean over responses
        is a mean over pairs. Metrics are TRL's, one value per pair, at the first token of the chosen response.
    """
    own, old = (each.masked_fill(~response_mask, 0.0).sum(dim=1) for each in (logprobs, old_logprobs.detach()))
    (chosen, rejected), log_ratios = own.view(-1, 2).unbind(1), (own - old).view(-1, 2)
    margins = beta * (log_ratios[:, 0] - log_ratios[:, 1])
    smoothed = (1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    losses = -smoothed / (1 - 2 * label_smoothing) - rpo_alpha * advantages[::2].to(chosen.dtype) * chosen
    rewards = beta * log_ratios.detach()
    metrics = {
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/margins": rewards[:, 0] - rewards[:, 1],
        "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).to(rewards.dtype),
        "logps/chosen": chosen.detach(),
        "logps/rejected": rejected.detach(),
    }
    never = torch.zeros_like(response_mask)

    def at_first(values: Tensor, rows: slice) -> Tensor:
        placed = logprobs.new_zeros(logprobs.shape)
        placed[rows, 0] = values
        return placed

    return PolicyLoss(
        loss=at_first(losses.repeat_interleave(2), slice(None)),
        ratio=_ratio(logprobs.detach(), old_logprobs),
        clipped_low=never,
        clipped_high=never,
        metrics={name: at_first(values, slice(None, None, 2)) for name, values in metrics.items()},
    )


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, algorithm: AlgorithmConfig
) -> PolicyLoss:
    """The configured loss, from policy_loss, clip_ratio_low, clip_ratio_high and clip_ratio_c.

    Values outside the mask, NaN included, reach neither the loss of a token inside nor any gradient. Raises ValueError,
    in one line, if a function of the user's own cannot be loaded, or returns anything but `LossOutputs` of fitting
    tensors.
    """
    # Filled before the formulas, because the gradient of a NaN is NaN even where its loss is not used.
    logprobs, old_logprobs, advantages = (
        each.masked_fill(~response_mask, 0.0) if each.dim() == 2 else each
        for each in (logprobs, old_logprobs, advantages)
    )
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs.detach(),
        advantages=advantages.detach(),
        response_mask=response_mask,
        clip_ratio_low=algorithm.clip_ratio_low,
        clip_ratio_high=algorithm.clip_ratio_high,
        clip_ratio_c=algorithm.clip_ratio_c,
    )
    function = algorithm.loss.load()
    if algorithm.loss.is_own:
        return _complete(function(inputs), inputs, algorithm.policy_loss)
    offered = vars(inputs) | {name: getattr(algorithm, name) for name in algorithm.loss.reads}
    built_in: PolicyLoss = function(**{name: offered[name] for name in inspect.signature(function).parameters})
    return built_in


def _complete(outputs: object, inputs: LossInputs, name: str) -> PolicyLoss:
    """Fill in the omitted outputs of a user's own loss; ValueError, in one line, for unsuitable outputs."""
    shape, what = inputs.logprobs.shape, f"algorithm.policy_loss: {name!r} returned"
    if not isinstance(outputs, LossOutputs):
        raise ValueError(f"{what} a {type(outputs).__name__}; allowed: a LossOutputs")  # noqa: TRY004 - as all others
    odd = [each for each in outputs.metrics if not isinstance(each, str) or not _METRIC.fullmatch(each)]
    if odd:
        raise ValueError(f"{what} the metric {odd[0]!r}; allowed: names of small letters, digits and _")
    given = {each.name: getattr(outputs, each.name) for each in fields(outputs) if each.name != "metrics"}
    given |= {f"metrics[{metric!r}]": value for metric, value in outputs.metrics.items()}
    for field_name, value in given.items():
        if value is None and field_name != "loss":
            continue
        if not isinstance(value, Tensor) or value.shape != shape:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"{what} {field_name} of {found}; allowed: a tensor of shape {tuple(shape)}")
        if value.is_floating_point() is field_name.startswith("clipped"):
            wanted = "booleans" if field_name.startswith("clipped") else "floating numbers"
            raise ValueError(f"{what} {field_name} in {value.dtype}; allowed: {wanted}")
    if inputs.logprobs.requires_grad and torch.is_grad_enabled() and not outputs.loss.requires_grad:
        raise ValueError(f"{what} loss without gradient; allowed: a loss that is computed from inputs.logprobs")
    ratio = _ratio(inputs.logprobs.detach(), inputs.old_logprobs) if outputs.ratio is None else outputs.ratio.detach()
    never = torch.zeros(shape, dtype=torch.bool, device=ratio.device)
    low, high = (never if each is None else each.bool() for each in (outputs.clipped_low, outputs.clipped_high))
    metrics = {metric: value.detach() for metric, value in outputs.metrics.items()}
    return PolicyLoss(outputs.loss, ratio, low, high, metrics)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """The ratio pi / pi_old of each token, [B, T], with the gradient of `logprobs` only."""
    return (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float | None
) -> PolicyLoss:
    advantage = _per_token(advantages, ratio)
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    ratio = ratio.detach()
    clipped_high = (ratio > 1 + clip_ratio_high) & (advantage > 0)
    if clip_ratio_c is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -clip_ratio_c * advantage), loss)
        clipped_high |= (ratio > clip_ratio_c) & (advantage < 0)
    return PolicyLoss(
        loss=loss,
        ratio=ratio,
        clipped_low=(ratio < 1 - clip_ratio_low) & (advantage < 0),
        clipped_high=clipped_high,
    )


def _per_token(advantages: Tensor, like: Tensor) -> Tensor:
    """Reshape advantages [B] or [B, T] to multiply `like`, [B, T], in its dtype."""
    return (advantages[:, None] if advantages.dim() == 1 else advantages).to(like.dtype)
