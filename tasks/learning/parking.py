"""Parking: moves a learner's tensors between its device and host memory, in place.

It is for a learner of one rank. Parameters, moments and buffers are moved; gradients do not outlive a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tasks.learning.adapted_policy import Pretrained
from tasks.learning.generation import free_device
from tasks.learning.learner import Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.trained_model import TrainedModel

HOST_MEMORY = torch.device("cpu")


@dataclass(frozen=True)
class Parked:
    """A learner in host memory. rng_state: of torch's CPU generator, which checkpoints hold too, [bytes] uint8.

    It may be read, as for publication, but not trained.
    """

    learner: Learner
    rng_state: Tensor

    @property
    def num_bytes(self) -> int:
        """The bytes that it holds."""
        return sum(tensor.nbytes for tensor in _tensors(self.learner))


def park(learner: Learner) -> Parked:
    """Move the learner to host memory, and free its device."""
    _move(learner, HOST_MEMORY)
    free_device(learner.ranks.device)
    return Parked(learner, torch.get_rng_state())


def unpark(parked: Parked) -> Learner:
    """Move the learner back to its device, and set torch's generator as it was."""
    _move(parked.learner, parked.learner.ranks.device)
    torch.set_rng_state(parked.rng_state)
    return parked.learner


def _move(learner: Learner, device: torch.device) -> None:
    """Move all tensors of a learner; their values and their objects stay the same."""
    with torch.no_grad():
        for tensor in _tensors(learner):
            tensor.data = tensor.data.to(device)


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
