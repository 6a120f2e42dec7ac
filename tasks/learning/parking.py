"""Parking: moves a learner's tensors between its device and host memory, in place.

It is for a learner of one rank. Parameters, moments and buffers are moved; gradients do not outlive a step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tasks.learning.adapted_policy import Pretrained
from tasks.learning.learner import Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.trained_model import TrainedModel


def move_learner(learner: Learner, device: torch.device) -> None:
    """Move all models and moments of a learner to a device; their values and their objects stay the same.

    While they are not on the learner's own device, they may be read, as for publication, but not trained.
    """
    with torch.no_grad():
        for tensor in _tensors(learner):
            tensor.data = tensor.data.to(device)


def state_bytes(learner: Learner) -> int:
    """The bytes of what `move_learner` moves."""
    return sum(tensor.nbytes for tensor in _tensors(learner))


def _tensors(learner: Learner) -> Iterator[Tensor]:
    """Every tensor of the learner once."""
    critic = learner.critic
    models: list[TrainedModel] = [learner.policy]
    if isinstance(learner.reference, TrainedModel):
        models.append(learner.reference)
    optimizers: list[PolicyOptimizer] = [learner.optimizer]
    if critic is not None:
        models.append(critic.critic)
        optimizers.append(critic.optimizer)
    assert isinstance(learner.reference, TrainedModel | Pretrained | None), "a reference of an unknown kind"
    seen: set[int] = set()
    for model in models:
        module: nn.Module = model.module
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor
    for optimizer in optimizers:
        yield from optimizer.state_tensors()
