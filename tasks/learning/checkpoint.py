"""Checkpoint: everything the trainer needs to go on bit for bit, as named tensors and a small JSON state. No pickle.

Tensors are called parameter.<name>, exp_avg.<name> and exp_avg_sq.<name>, all float32. They are written by
`storage.weights`, whose manifest comes last: a checkpoint without one does not exist. Does not know which checkpoint is
the newest, nor how long one is kept.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from storage import layout, records, weights
from storage.store import CorruptObject, ObjectStore
from tasks.learning.optimizer import Moments, PolicyOptimizer
from tasks.learning.trained_model import TrainedModel
from tasks.sampling.weight_tensors import as_block, as_torch

_STATE = "trainer_state"
_KINDS = ("parameter", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a checkpoint holds besides tensors.

    Attributes:
        format: Of this record.
        weight_version: The version these parameters are published as.
        optimizer_steps: Steps taken since the beginning of the run; position of the learning-rate schedule.
        rng_state: Of torch's CPU generator, base64.
    """

    __pydantic_config__ = records.STRICT
    format: Literal[1] = 1
    weight_version: int
    optimizer_steps: int
    rng_state: str

    @classmethod
    def capture(cls, weight_version: int, optimizer: PolicyOptimizer) -> "TrainerState":
        """The state as it is now."""
        rng_state = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
        return cls(weight_version=weight_version, optimizer_steps=optimizer.steps, rng_state=rng_state)

    def rng_tensor(self) -> Tensor:
        """The generator's state as torch.set_rng_state takes it, [bytes] uint8."""
        return torch.frombuffer(bytearray(base64.b64decode(self.rng_state)), dtype=torch.uint8)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory; parameters by their Hugging Face names, float32 on the CPU."""

    state: TrainerState
    parameters: dict[str, Tensor]
    moments: Moments


def save(
    store: ObjectStore,
    prefix: str,
    model: TrainedModel,
    optimizer: PolicyOptimizer,
    state: TrainerState,
) -> weights.Manifest:
    """Write a checkpoint below `prefix` (`layout.checkpoint`); it exists once its manifest does.

    The same state may be saved again; another one under the same prefix is refused.

    Raises:
        StorageError: As `storage.weights.publish`.
    """
    moments = optimizer.moments()
    sets = (model.tensors(), moments.exp_avg, moments.exp_avg_sq)
    blocks = {
        f"{kind}.{name}": as_block(tensor)
        for kind, tensors in zip(_KINDS, sets, strict=True)
        for name, tensor in tensors.items()
    }
    return weights.publish(store, prefix, blocks, {_STATE: asdict(state)})


def read(store: ObjectStore, prefix: str) -> Checkpoint:
    """The verified checkpoint below `prefix`.

    Raises:
        ObjectMissing: There is none.
        CorruptObject: It fails its checksums, or is not a trainer's checkpoint; it is not used.
    """
    manifest, blocks = weights.pull(store, prefix)
    key = layout.manifest(prefix)
    if _STATE not in manifest.metadata:
        raise CorruptObject(key, f"metadata: no {_STATE!r}; allowed: manifests of checkpoints")
    state = records.decode(TrainerState, key, json.dumps(manifest.metadata[_STATE]).encode())
    sets = _by_kind(key, blocks)
    return Checkpoint(state, sets["parameter"], Moments(sets["exp_avg"], sets["exp_avg_sq"]))


def restore(checkpoint: Checkpoint, model: TrainedModel, optimizer: PolicyOptimizer) -> TrainerState:
    """Make model, optimizer and torch's CPU generator what they were when `checkpoint` was taken.

    Raises:
        ValueError: The checkpoint is of another model (PolicyError for its parameters).
    """
    model.load_tensors(checkpoint.parameters)
    optimizer.restore(checkpoint.state.optimizer_steps, checkpoint.moments)
    torch.set_rng_state(checkpoint.state.rng_tensor())
    return checkpoint.state


def _by_kind(key: str, blocks: Mapping[str, weights.TensorBlock]) -> dict[str, dict[str, Tensor]]:
    sets: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}
    for full_name, block in blocks.items():
        kind, _, name = full_name.partition(".")
        if kind not in sets or block.dtype != "F32":
            raise CorruptObject(key, f"tensor {full_name!r} of {block.dtype}; allowed: F32 of {', '.join(_KINDS)}")
        sets[kind][name] = as_torch(block)
    return sets
