"""Critic: a model of its own that predicts, before each token, the return of the rest of a response.

The critic is the policy's pretrained body with a linear output, initially zero. A step of the critic accumulates the
gradient of the value loss, as `tasks.learning.step` does for the policy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import TokenBatch
from tasks.learning.loss import clipped_value_loss
from tasks.learning.optimizer import NonFiniteGradient, PolicyOptimizer
from tasks.learning.policy import own_tensors
from tasks.learning.ranks import Ranks
from tasks.learning.scoring import Valuer
from tasks.learning.sharded import Stored, add_nothing, skeleton
from tasks.learning.trained_model import TrainedModel, read_architecture, training_device


class Critic(TrainedModel):
    """A value model on one device, or divided among ranks. Not thread-safe.

    Tensors are named model.<name in the body> and value_head.{weight,bias}.

    Args:
        model_dir: A directory with the policy's config.json.
        tensors: As returned by `tensors()`.
        config: dtype, device and gradient_checkpointing are used.
        ranks: The ranks that train the critic; default: this process alone, on the device of the configuration.

    Raises:
        PolicyError: The model does not exist, or the tensors have other names or shapes.
    """

    def __init__(
        self,
        model_dir: str | Path,
        tensors: Mapping[str, Stored],
        config: TrainerConfig,
        *,
        ranks: Ranks | None = None,
    ) -> None:
        ranks = ranks or Ranks(device=training_device(config.device))
        with skeleton(ranks):
            module = Valuer(_body(Path(model_dir)))
        super().__init__(module, tensors, config, uncopied=[module.value_head], ranks=ranks)

    @classmethod
    def of_policy(
        cls,
        model_dir: str | Path,
        tensors: Mapping[str, Stored],
        config: TrainerConfig,
        *,
        ranks: Ranks | None = None,
    ) -> "Critic":
        """An untrained critic: the body of a policy's stored `tensors`, and a head whose values are zero."""
        with torch.device("meta"):
            body = _body(Path(model_dir))
        prefix = f"{body.base_model_prefix}."
        own = own_tensors(read_architecture(Path(model_dir)), tensors)
        names = {name.removeprefix(prefix): tensor for name, tensor in own if name.startswith(prefix)}
        hidden = body.get_input_embeddings().weight.shape[1]
        head = {"value_head.weight": torch.zeros(1, hidden), "value_head.bias": torch.zeros(1)}
        return cls(model_dir, {f"model.{name}": tensor for name, tensor in names.items()} | head, config, ranks=ranks)

    def values(self, batch: TokenBatch) -> Tensor:
        """The value V(t) before each token t of the mask: [B, T] float32 with gradient, 0 off the mask, on `device`."""
        values: Tensor = self.module(batch.to(self.device))
        return values


def _body(model_dir: Path) -> Any:
    config = read_architecture(model_dir)
    from transformers import AutoModel  # noqa: PLC0415 - costs seconds, and only here

    return AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)


# The variance that rounding leaves for equal numbers, as a share of their mean square.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class ValueTotals:
    """Sums over the trained tokens of one critic step.

    Attributes:
        tokens: The number of trained tokens.
        loss: The value losses (`clipped_value_loss`).
        clipped: The number of tokens whose clipped loss exceeds the unclipped loss.
        values: The values of the critic that is trained.
        returns: The returns.
        returns_square: The squared returns.
        errors: The returns less the values before the iteration's first optimizer step.
        errors_square: The squared errors.
    """

    tokens: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    values: float = 0.0
    returns: float = 0.0
    returns_square: float = 0.0
    errors: float = 0.0
    errors_square: float = 0.0

    def __add__(self, other: "ValueTotals") -> "ValueTotals":
        return ValueTotals(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def metrics(self) -> dict[str, float]:
        """The metrics under verl's names.

        The explained variance is 1 - Var(returns - old values) / Var(returns), and 0 if all returns are equal.
        """
        count = max(1, self.tokens)
        spread = self.returns_square / count - (self.returns / count) ** 2
        left = self.errors_square / count - (self.errors / count) ** 2
        return {
            "critic/vf_loss": self.loss / count,
            "critic/vf_clipfrac": self.clipped / count,
            "critic/vpred_mean": self.values / count,
            "critic/returns/mean": self.returns / count,
            "critic/vf_explained_var": 1 - left / spread if spread > _ROUNDING * self.returns_square / count else 0.0,
        }


def accumulate_values(
    critic: Critic, batch: TokenBatch, old_values: Tensor, returns: Tensor, value_clip: float | None
) -> ValueTotals:
    """Add one micro-batch's gradient to the critic's: the sum of `clipped_value_loss` over its tokens.

    Args:
        critic: The model that gets the gradient.
        batch: B responses.
        old_values: [B, T] float32, the critic's values before the iteration's first optimizer step.
        returns: [B, T] float32.
        value_clip: As in `clipped_value_loss`.

    Raises:
        NonFiniteGradient: The loss is not finite; names the responses. All gradients are dropped.
    """
    batch = batch.to(critic.device)
    old_values, returns = (each.to(critic.device, non_blocking=True) for each in (old_values, returns))
    values = critic.values(batch)
    losses = clipped_value_loss(values, old_values, returns, value_clip).masked_fill(~batch.response_mask, 0.0)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    totals = _measure(values.detach(), losses.detach(), old_values, returns, batch.response_mask, value_clip)
    if not math.isfinite(totals.loss):
        critic.drop_gradient()
        finite = torch.isfinite(losses).all(dim=1).tolist()
        failed = [response for response, is_finite in zip(batch.responses, finite, strict=True) if not is_finite]
        raise NonFiniteGradient("loss of the critic", failed)
    return totals


def take_part_in_values(critic: Critic, idle: TokenBatch) -> None:
    """Make a pass of a rank without responses: the collectives of `accumulate_values`, and no gradient."""
    add_nothing(critic.values(idle))


def apply_values(optimizer: PolicyOptimizer, totals: ValueTotals, responses: tuple[int, ...]) -> dict[str, float]:
    """Take the critic's optimizer step on the mean over tokens and return its metrics; raises as `step.apply`."""
    try:
        outcome = optimizer.step(float(totals.tokens), responses)
    except NonFiniteGradient as error:
        raise NonFiniteGradient(f"{error.quantity} of the critic", error.responses) from error
    return totals.metrics() | {"critic/grad_norm": outcome.grad_norm, "critic/lr": outcome.learning_rate}


def _measure(
    values: Tensor, losses: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, value_clip: float | None
) -> ValueTotals:
    clipped = torch.zeros_like(mask)
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped = (near - returns).square() > (values - returns).square()
    errors = returns - old_values
    sums = [
        each.masked_fill(~mask, 0).sum(dtype=torch.float64)
        for each in (mask, losses, clipped, values, returns, returns.square(), errors, errors.square())
    ]
    tokens, *others = torch.stack(sums).tolist()
    names = [f.name for f in fields(ValueTotals)][1:]
    return ValueTotals(tokens=int(tokens), **dict(zip(names, others, strict=True)))
