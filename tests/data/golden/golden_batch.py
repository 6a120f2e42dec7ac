"""The batch that both peers are given, and how its tensors are written: ragged, without padding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SEED = 20241506
LENGTHS = (9, 1, 4, 2, 7, 5)
RESPONSES_PER_GROUP = 2
MAX_COMPLETION_LENGTH = 16
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
KL_COEF = 0.04
CAP = 3.0
# verl always clips negative advantages once more, and values; a bound so far away never acts.
NO_CLIP = 1e9
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")

Golden = dict[str, Any]


class Batch:
    """One ragged batch of six responses in three groups; float64, padded with zeros to [6, 9].

    The log ratios are wide enough for both clips, the dual clip at 3 and the cap of the weights to act somewhere.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(SEED)
        self.mask = (torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]).double()
        self.logprobs = (-2.0 * self._uniform() - 0.05) * self.mask
        self.old_logprobs = self._near(self.logprobs, 0.7)
        self.reference_logprobs = self._near(self.logprobs, 0.4)
        self.sampler_logprobs = self._near(self.old_logprobs, 0.5)
        self.values = self._normal()
        self.old_values = self.values + 0.3 * self._normal()
        self.token_rewards = 0.1 * self._normal()
        self.advantages = torch.randn(len(LENGTHS), generator=self.generator)
        self.rewards = torch.randn(len(LENGTHS), generator=self.generator)

    def _normal(self) -> Tensor:
        return torch.randn(self.mask.shape, generator=self.generator) * self.mask

    def _near(self, logprobs: Tensor, deviation: float) -> Tensor:
        return (logprobs + deviation * self._normal()).clamp(max=-0.01) * self.mask

    def _uniform(self) -> Tensor:
        return torch.rand(self.mask.shape, generator=self.generator) * self.mask

    def inputs(self, *names: str) -> Golden:
        """Those tensors of the batch as lists."""
        return {name: listed(getattr(self, name)) for name in names}


def listed(tensor: Tensor) -> list[Any]:
    """One number per response as a list, or one per token as a list per response, without its padding."""
    if tensor.dim() == 1:
        return tensor.tolist()
    return [row[:length].tolist() for row, length in zip(tensor.expand(-1, max(LENGTHS)), LENGTHS, strict=True)]


def differentiated(function: Callable[[Tensor], Tensor], at: Tensor) -> Golden:
    """The value and the gradient of a scalar function of a per-token tensor."""
    variable = at.clone().requires_grad_()
    value = function(variable)
    (gradient,) = torch.autograd.grad(value, variable)
    return {"value": value.item(), "gradient": listed(gradient)}
