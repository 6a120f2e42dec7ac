"""Parking: moves a learner's tensors between its device and host memory, in place.

Each of several ranks moves its own parts; ranks communicate only the state of torch's generator. Parameters, moments
and buffers move; gradients do not outlive a step, and half-precision copies are made again.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.learning.adapted_policy import Pretrained
from tasks.learning.generation import free_device
from tasks.learning.learner import Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.sharded import Relocate, own_part
from tasks.learning.trained_model import TrainedModel

HOST_MEMORY = torch.device("cpu")


@dataclass(frozen=True)
class Parked:
    """A parked learner: in host memory, or on its device if `park` did not move the learner.

    A parked learner may be read, as for publication, but not trained.

    Attributes:
        learner: The learner.
        rng_state: The state of the first rank's CPU generator, as in checkpoints, [bytes] uint8.
    """

    learner: Learner
    rng_state: Tensor

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank holds."""
        return sum(own_part(tensor).nbytes for tensor in _tensors(self.learner))


def park(learner: Learner, *, moves: bool = True) -> Parked:
    """Park a learner: with `moves`, move it to host memory and free its device. Every rank must call `park`."""
    if moves:
        _move(learner, HOST_MEMORY)
        free_device(learner.ranks.device)
    drawn = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    # A rank that restores a checkpoint goes on from the first rank's state, so one that does not has to, too.
    rng_state = bytearray(base64.b64decode(learner.ranks.broadcast(drawn)))
    return Parked(learner, torch.frombuffer(rng_state, dtype=torch.uint8))


def unpark(parked: Parked) -> Learner:
    """Move the learner back to its device, and set torch's generator as it was."""
    _move(parked.learner, parked.learner.ranks.device)
    torch.set_rng_state(parked.rng_state)
    return parked.learner


def relocate(learner: Learner, to: Relocate) -> None:
    """Replace the memory of every tensor of the learner by the result of `to`; parameter objects stay."""
    with torch.no_grad():
        for model in _models(learner):
            model.relocate(to)
        for optimizer in _optimizers(learner):
            optimizer.relocate(to)


def _move(learner: Learner, device: torch.device) -> None:
    if learner.ranks.device.type != HOST_MEMORY.type:
        relocate(learner, lambda tensor: tensor.to(device))


def _models(learner: Learner) -> list[TrainedModel]:
    assert isinstance(learner.reference, TrainedModel | Pretrained | None), "a reference of an unknown kind"
    models: list[TrainedModel] = [learner.policy]
    if isinstance(learner.reference, TrainedModel):
        models.append(learner.reference)
    if learner.critic is not None:
        models.append(learner.critic.critic)
    if learner.teachers is not None:
        models += learner.teachers.loaded
    return models


def _optimizers(learner: Learner) -> list[PolicyOptimizer]:
    return [learner.optimizer] if learner.critic is None else [learner.optimizer, learner.critic.optimizer]


def _tensors(learner: Learner) -> Iterator[Tensor]:
    """Every tensor of the learner once."""
    for model in _models(learner):
        yield from model.memory()
    for optimizer in _optimizers(learner):
        yield from optimizer.state_tensors()
