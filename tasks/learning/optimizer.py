"""The optimizer of a policy: AdamW with a learning-rate schedule, applied to an accumulated, undivided gradient.

Parameters may be divided among ranks: each rank then updates its part, after clipping by the norm of the whole
gradient. The optimizer keeps the moments and the number of steps taken.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from tasks.configuration.optimizer import OptimizerConfig
from tasks.learning.sharded import Relocate, Stored, copy_stored, whole

Held = TypeVar("Held", Tensor, Stored)
_CLIP_EPS = 1e-6
_RESPONSES_SHOWN = 16


class NonFiniteGradient(ArithmeticError):  # noqa: N818 - reads as what happened
    """The loss or its gradient is infinite or not a number; weights are unchanged and the gradient is dropped.

    `responses` are the ids of the responses that may have caused it.
    """

    def __init__(self, quantity: str, responses: Sequence[int]) -> None:
        self.quantity = quantity
        self.responses = tuple(responses)
        more = len(self.responses) - _RESPONSES_SHOWN
        shown = ", ".join(str(response) for response in self.responses[:_RESPONSES_SHOWN])
        super().__init__(f"non-finite {quantity}; responses {shown}{f' and {more} more' if more > 0 else ''}")


@dataclass(frozen=True)
class StepOutcome:
    """The gradient's 2-norm before clipping, and the learning rate, of one optimizer step."""

    grad_norm: float
    learning_rate: float


@dataclass(frozen=True)
class Moments(Generic[Held]):
    """AdamW's running means of the gradient and its square: parameter name -> tensor of its shape and dtype."""

    exp_avg: dict[str, Held]
    exp_avg_sq: dict[str, Held]


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """The learning rate of optimizer step `step` (counted from 0): linear warm-up, then the schedule.

    "linear" and "cosine" (arXiv 1608.03983, equation 5, without restarts) fall from the peak at the end of the warm-up
    to the minimum at total_steps and stay there.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    remaining = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    floor = config.min_learning_rate_ratio
    return config.learning_rate * (floor + (1 - floor) * remaining)


class PolicyOptimizer:
    """AdamW (arXiv 1711.05101) over named parameters; vectors (norms, biases) are not decayed.

    Args:
        parameters: Name -> parameter; those that have a gradient are updated.
        config: Rates, schedule and clipping.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._steps = 0
        matrices = [p for p in self._parameters.values() if p.dim() >= 2]
        vectors = [p for p in self._parameters.values() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for parameter in self._parameters.values():
            # Created now instead of at the first step, so that a checkpoint always has the same tensors.
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @property
    def steps(self) -> int:
        """Optimizer steps taken since the beginning of the run."""
        return self._steps

    def step(self, denominator: float, responses: Sequence[int] = ()) -> StepOutcome:
        """Divide the accumulated gradient by `denominator`, clip it, update the parameters, drop the gradient.

        The gradient is scaled by max_grad_norm / (norm + 1e-6) when that is below 1.

        Args:
            denominator: See `tasks.learning.loss.denominator`.
            responses: The responses of the gradient, for the error's message.

        Raises:
            NonFiniteGradient: The gradient's norm is not finite; parameters and moments are unchanged.
            ValueError: No parameter has a gradient.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            raise ValueError("optimizer step: no parameter has a gradient")
        norm = float(whole(torch.nn.utils.get_total_norm(gradients))) / denominator
        if not math.isfinite(norm):
            self.drop_gradient()
            raise NonFiniteGradient("gradient", responses)
        clip = min(1.0, self._config.max_grad_norm / (norm + _CLIP_EPS))
        torch._foreach_mul_(gradients, clip / denominator)
        rate = learning_rate(self._steps, self._config)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._steps += 1
        self.drop_gradient()
        return StepOutcome(grad_norm=norm, learning_rate=rate)

    def drop_gradient(self) -> None:
        """Drop the accumulated gradient."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def moments(self) -> Moments[Tensor]:
        """The running means. The tensors are not copies but the optimizer's own, sharded if the parameters are."""
        states = {name: self._adamw.state[p] for name, p in self._parameters.items()}
        return Moments(
            exp_avg={name: state["exp_avg"] for name, state in states.items()},
            exp_avg_sq={name: state["exp_avg_sq"] for name, state in states.items()},
        )

    def state_tensors(self) -> Iterator[Tensor]:
        """Every tensor of the optimizer's own state."""
        for state in self._adamw.state.values():
            yield from state.values()

    def relocate(self, to: Relocate) -> None:
        """Replace every tensor of the optimizer's own state by what `to` returns."""
        for state in self._adamw.state.values():
            state.update({name: to(tensor) for name, tensor in state.items()})

    def restore(self, steps: int, moments: Moments[Stored]) -> None:
        """Continue after `steps` steps with `moments`, of which each rank takes its part.

        Raises ValueError, with nothing changed, if names or shapes differ.
        """
        pairs: list[tuple[Tensor, Stored]] = []
        own = self.moments()
        for kind, mine, theirs in (
            ("exp_avg", own.exp_avg, moments.exp_avg),
            ("exp_avg_sq", own.exp_avg_sq, moments.exp_avg_sq),
        ):
            if mine.keys() != theirs.keys():
                raise ValueError(f"{kind}: names differ from the model's: {sorted(mine.keys() ^ theirs.keys())[:5]}")
            for name, tensor in mine.items():
                if tensor.shape != theirs[name].shape:
                    raise ValueError(
                        f"{kind} {name!r}: shape {tuple(theirs[name].shape)}; allowed: {tuple(tensor.shape)}"
                    )
                pairs.append((tensor, theirs[name]))
        with torch.no_grad():
            for tensor, value in pairs:
                copy_stored(tensor, value)
            for parameter in self._parameters.values():
                self._adamw.state[parameter]["step"].fill_(steps)
        self._steps = steps
