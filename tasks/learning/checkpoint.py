"""Checkpoint: everything the trainer needs to go on bit for bit, as named tensors and a small JSON state. No pickle.

Tensors are named parameter.<name>, exp_avg.<name> and exp_avg_sq.<name>, all float32. Their manifest is written last: a
checkpoint without a manifest does not exist. It stores whole tensors, so it depends neither on how many ranks wrote it
nor on how many read it; torch.distributed.checkpoint would store shards and keep its metadata as a pickle.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import islice

import torch
from torch import Tensor

from storage import canonical, layout, records
from storage.run import exists
from storage.store import ConflictingRecord, CorruptObject, ObjectStore
from storage.weights import tensor_sets
from tasks.learning.optimizer import Moments, PolicyOptimizer
from tasks.learning.ranks import Ranks
from tasks.learning.sharded import Stored, whole
from tasks.learning.shared_reading import read_shared
from tasks.learning.trained_model import TrainedModel
from tasks.sampling.engines.weight_tensors import as_block

_STATE = "trainer_state"
_KINDS = ("parameter", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state in a checkpoint besides tensors.

    Attributes:
        weight_version: The version under which these parameters are published.
        optimizer_steps: Steps taken since the beginning of the run, which is the position in the schedule.
        rng_state: The state of torch's CPU generator, in base64.
    """

    __pydantic_config__ = records.STRICT
    weight_version: int
    optimizer_steps: int
    rng_state: str

    @classmethod
    def capture(cls, weight_version: int, optimizer: PolicyOptimizer) -> "TrainerState":
        """Record the current state."""
        rng_state = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
        return cls(weight_version=weight_version, optimizer_steps=optimizer.steps, rng_state=rng_state)

    def rng_tensor(self) -> Tensor:
        """The generator's state as torch.set_rng_state takes it, [bytes] uint8."""
        return torch.frombuffer(bytearray(base64.b64decode(self.rng_state)), dtype=torch.uint8)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory. Parameters have their Hugging Face names and are float32 on the CPU.

    Of several ranks each has its own rows.
    """

    state: TrainerState
    parameters: dict[str, Stored]
    moments: Moments[Stored]


class Saving:
    """A checkpoint that is being written: objects in the background, then the manifest by `finish`.

    The model and the optimizer must not change until then, because tensors on the CPU are written without a copy.
    """

    def __init__(self, store: ObjectStore, prefix: str, state: TrainerState, ranks: Ranks) -> None:
        self._store = store
        self._prefix = prefix
        self._state = state
        self._ranks = ranks
        # If the checkpoint is stored already, its tensors are only compared, not uploaded.
        self._upload = not ranks.broadcast(ranks.is_first and exists(store, layout.manifest(prefix)))
        self._pool = ThreadPoolExecutor(tensor_sets.UPLOADS, "checkpoint")
        self._parts: dict[int, Future[tensor_sets.Manifest]] = {}

    def add(self, number: int, tensors: Mapping[str, tensor_sets.TensorBlock]) -> None:
        """Write object `number` of the checkpoint in the background, once fewer than UPLOADS run. Raises nothing."""
        running = [part for part in self._parts.values() if not part.done()]
        if len(running) >= tensor_sets.UPLOADS:
            wait(running, return_when=FIRST_COMPLETED)
        self._parts[number] = self._pool.submit(
            tensor_sets.write_object, self._store, self._prefix, tensors, upload=self._upload
        )

    def finish(self) -> tensor_sets.Manifest:
        """Wait for the objects of all ranks, then let the first rank write the manifest; every rank must call it.

        Returns the stored manifest. If one rank raises StorageError, every rank raises: ConflictingRecord on all ranks,
        or else the error on its own rank and RankError on the others.
        """
        with self._pool, self._ranks.failing_together():
            own = {number: canonical.encode(part.result()).decode() for number, part in self._parts.items()}
        encoded = {int(number): part for parts in self._ranks.gather(own) for number, part in parts.items()}
        key = layout.manifest(self._prefix)
        parts = [canonical.decode(tensor_sets.Manifest, key, encoded[number].encode()) for number in sorted(encoded)]
        conflict = None
        with self._ranks.failing_together():
            if self._ranks.is_first:
                try:
                    tensor_sets.write_manifest(self._store, self._prefix, parts, {_STATE: asdict(self._state)})
                except ConflictingRecord as error:
                    conflict = str(error)
        if conflict := self._ranks.broadcast(conflict):
            raise ConflictingRecord(conflict)
        return tensor_sets.read_manifest(self._store, self._prefix)


def begin(
    store: ObjectStore,
    prefix: str,
    model: TrainedModel,
    optimizer: PolicyOptimizer,
    state: TrainerState,
    ranks: Ranks | None = None,
    object_bytes_max: int = tensor_sets.OBJECT_BYTES_MAX,
) -> Saving:
    """Begin to write a checkpoint below `prefix` (`layout.checkpoint`); it exists once `finish` has returned.

    With several ranks, all must call it: they gather tensor by tensor, and rank i % world_size writes object i, so that
    no rank holds more than what it is writing. The first rank's `state` is stored.

    Raises:
        StorageError: The check whether the checkpoint is stored already failed.
    """
    ranks = ranks or Ranks()
    saving = Saving(store, prefix, state, ranks)
    moments = optimizer.moments()
    shapes = {f"{_KINDS[0]}.{name}": shape for name, shape in model.trained_shapes().items()}
    for kind, tensors in zip(_KINDS[1:], (moments.exp_avg, moments.exp_avg_sq), strict=True):
        shapes |= {f"{kind}.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}
    source = _whole_tensors(model, moments)
    sizes = {name: math.prod(shape) * torch.float32.itemsize for name, shape in shapes.items()}
    for number, names in enumerate(tensor_sets.objects_of(sizes, object_bytes_max)):
        writes = number % ranks.world_size == ranks.rank
        blocks = {name: as_block(tensor) for name, tensor in islice(source, len(names)) if writes}
        if writes:
            saving.add(number, blocks)
    return saving


def save(
    store: ObjectStore,
    prefix: str,
    model: TrainedModel,
    optimizer: PolicyOptimizer,
    state: TrainerState,
    ranks: Ranks | None = None,
    object_bytes_max: int = tensor_sets.OBJECT_BYTES_MAX,
) -> tensor_sets.Manifest:
    """Write a checkpoint below `prefix` and wait until it exists, by `begin` and `Saving.finish`.

    The same state may be saved again; a different one under the same prefix is refused.

    Raises:
        StorageError: As `storage.weights.tensor_sets.publish`.
    """
    return begin(store, prefix, model, optimizer, state, ranks, object_bytes_max).finish()


def _whole_tensors(model: TrainedModel, moments: Moments[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint, gathered one after the other."""
    for name, tensor in model.each_trained():
        yield f"{_KINDS[0]}.{name}", tensor
    for kind, tensors in zip(_KINDS[1:], (moments.exp_avg, moments.exp_avg_sq), strict=True):
        for name, tensor in tensors.items():
            yield f"{kind}.{name}", whole(tensor)


def read(store: ObjectStore, prefix: str, ranks: Ranks | None = None) -> Checkpoint:
    """Read and verify the checkpoint below `prefix`; with several ranks, all must call it, and each gets its rows.

    Raises:
        ObjectMissing: There is no checkpoint.
        CorruptObject: It fails its checksums, or is not a trainer's checkpoint.
    """
    ranks, key = ranks or Ranks(), layout.manifest(prefix)
    with ranks.failing_together():
        manifest = tensor_sets.read_manifest(store, prefix)
    tensors = read_shared(ranks, manifest.tensors, lambda names: tensor_sets.pull_some(store, prefix, manifest, names))
    if _STATE not in manifest.metadata:
        raise CorruptObject(key, f"metadata: no {_STATE!r}; allowed: manifests of checkpoints")
    state = canonical.decode(TrainerState, key, json.dumps(manifest.metadata[_STATE]).encode())
    sets = _by_kind(key, manifest, tensors)
    return Checkpoint(state, sets["parameter"], Moments(sets["exp_avg"], sets["exp_avg_sq"]))


def restore(checkpoint: Checkpoint, model: TrainedModel, optimizer: PolicyOptimizer) -> TrainerState:
    """Restore model, optimizer and torch's CPU generator to their state in `checkpoint`.

    Raises:
        ValueError: The checkpoint is of another model (PolicyError if its parameters differ).
    """
    model.load_trained(checkpoint.parameters)
    optimizer.restore(checkpoint.state.optimizer_steps, checkpoint.moments)
    torch.set_rng_state(checkpoint.state.rng_tensor())
    return checkpoint.state


def _by_kind(key: str, manifest: tensor_sets.Manifest, tensors: Mapping[str, Stored]) -> dict[str, dict[str, Stored]]:
    sets: dict[str, dict[str, Stored]] = {kind: {} for kind in _KINDS}
    for full_name, tensor in tensors.items():
        kind, _, name = full_name.partition(".")
        dtype = manifest.tensors[full_name].dtype
        if kind not in sets or dtype != "F32":
            raise CorruptObject(key, f"tensor {full_name!r} of {dtype}; allowed: F32 of {', '.join(_KINDS)}")
        sets[kind][name] = tensor
    return sets
