"""Checkpoint: everything the trainer needs to go on bit for bit, as named tensors and a small JSON state. No pickle.

Tensors are named parameter.<name> and <kind>.<name>, with the kinds of `tasks.learning.optimizer_rules`; all are
float32 but codes of 8 bits. Their manifest is written last: a checkpoint without a manifest does not exist. A
checkpoint has whole tensors, so the number of ranks that write and the number of ranks that read may differ;
torch.distributed.checkpoint would store shards and keep metadata as a pickle.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from storage.clock import Clock, SystemClock
from storage.records import canonical, layout, records
from storage.records.run import exists
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectStore
from storage.weights import tensor_sets
from storage.weights.tensor_sets import PUBLISHED_AT_S, WRITE_S
from tasks.configuration.optimizer import ADAMW, OptimizerName
from tasks.learning.optimizer import Moments, PolicyOptimizer
from tasks.learning.optimizer_rules import KINDS
from tasks.learning.ranks import Ranks
from tasks.learning.sharded import Stored, Unread
from tasks.learning.shared_reading import unread
from tasks.learning.trained_model import TrainedModel
from tasks.sampling.engines.weight_tensors import as_block

_STATE = "trainer_state"
_PARAMETER = "parameter"
_DTYPES = {_PARAMETER: "F32", **{kind: "U8" if is_code else "F32" for kind, is_code in KINDS.items()}}


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The state in a checkpoint besides tensors.

    Attributes:
        weight_version: The version under which these parameters are published.
        optimizer_steps: Steps taken since the beginning of the run, which is the position in the schedule.
        rng_state: The state of torch's CPU generator, in base64.
        optimizer: OptimizerConfig.name. Absent in the stored JSON for "adamw".
    """

    __pydantic_config__ = records.STRICT
    weight_version: int
    optimizer_steps: int
    rng_state: str
    optimizer: OptimizerName = ADAMW

    @classmethod
    def capture(cls, weight_version: int, optimizer: PolicyOptimizer) -> "TrainerState":
        """Record the current state."""
        rng_state = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
        return cls(
            weight_version=weight_version,
            optimizer_steps=optimizer.steps,
            rng_state=rng_state,
            optimizer=optimizer.name,
        )

    def document(self) -> dict[str, Any]:
        """The state as JSON values."""
        found = asdict(self)
        if self.optimizer == ADAMW:
            del found["optimizer"]
        return found

    def rng_tensor(self) -> Tensor:
        """The generator's state as torch.set_rng_state takes it, [bytes] uint8."""
        return torch.frombuffer(bytearray(base64.b64decode(self.rng_state)), dtype=torch.uint8)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, read into host memory or opened. With several ranks, each rank has its own rows.

    Attributes:
        state: The state besides tensors.
        parameters: Hugging Face name -> float32 tensor.
        moments: Kind -> parameter name -> tensor of the optimizer's state.
    """

    state: TrainerState
    parameters: dict[str, Stored]
    moments: Moments


def save(
    store: ObjectStore,
    prefix: str,
    model: TrainedModel,
    optimizer: PolicyOptimizer,
    state: TrainerState,
    ranks: Ranks | None = None,
    object_bytes_max: int = tensor_sets.OBJECT_BYTES_MAX,
    clock: Clock | None = None,
    began_s: float | None = None,
) -> tensor_sets.Manifest:
    """Write a checkpoint below `prefix` (`layout.checkpoint`) and wait until it exists; returns the stored manifest.

    The model and the optimizer must not change meanwhile, because tensors on the CPU are written without a copy. With
    several ranks, every rank must call `save`: ranks gather tensor by tensor, and rank i % world_size writes object i,
    so that a rank holds only the objects that are being uploaded. The first rank's `state` is stored, and the seconds
    of writing, counted from `began_s` on `clock` (default: from the call). An equal state may be saved again; a
    different state under the prefix is refused.

    Raises:
        ConflictingRecord: Another state is stored; raised on every rank.
        StorageError: As `storage.weights.tensor_sets.publish`; ranks on which no error occurred raise RankError.
    """
    ranks, clock = ranks or Ranks(), clock or SystemClock()
    began_s = clock.monotonic() if began_s is None else began_s
    # If the checkpoint is stored already, its tensors are only compared, not uploaded.
    with ranks.failing_together():
        stored = ranks.is_first and exists(store, layout.manifest(prefix))
    parts = _write_objects(
        store,
        prefix,
        _whole_tensors(model, optimizer),
        _sizes(model, optimizer),
        object_bytes_max,
        ranks,
        upload=not ranks.broadcast(stored),
    )
    conflict = None
    with ranks.failing_together():
        if ranks.is_first:
            metadata = {_STATE: state.document(), WRITE_S: clock.monotonic() - began_s, PUBLISHED_AT_S: clock.wall()}
            try:
                tensor_sets.write_manifest(store, prefix, parts, metadata)
            except ConflictingRecord as error:
                conflict = str(error)
    if conflict := ranks.broadcast(conflict):
        raise ConflictingRecord(conflict)
    return tensor_sets.read_manifest(store, prefix)


def _write_objects(
    store: ObjectStore,
    prefix: str,
    tensors: Iterator[tuple[str, Tensor]],
    sizes: Mapping[str, int],
    object_bytes_max: int,
    ranks: Ranks,
    *,
    upload: bool,
) -> list[tensor_sets.Manifest]:
    """Write the objects of a checkpoint, UPLOADS at a time; returns their parts of the manifest on every rank."""
    own: dict[int, Future[tensor_sets.Manifest]] = {}
    with ThreadPoolExecutor(tensor_sets.UPLOADS, "checkpoint") as pool:
        for number, names in enumerate(tensor_sets.objects_of(sizes, object_bytes_max)):
            writes = number % ranks.world_size == ranks.rank
            blocks = {name: as_block(tensor) for name, tensor in islice(tensors, len(names)) if writes}
            if writes:
                running = [part for part in own.values() if not part.done()]
                if len(running) >= tensor_sets.UPLOADS:
                    wait(running, return_when=FIRST_COMPLETED)
                own[number] = pool.submit(tensor_sets.write_object, store, prefix, blocks, upload=upload)
        # Not before: tensors are gathered in a collective.
        with ranks.failing_together():
            encoded = {number: canonical.encode(part.result()).decode() for number, part in own.items()}
    written = {int(number): part for parts in ranks.gather(encoded) for number, part in parts.items()}
    key = layout.manifest(prefix)
    return [canonical.decode(tensor_sets.Manifest, key, written[number].encode()) for number in sorted(written)]


def _sizes(model: TrainedModel, optimizer: PolicyOptimizer) -> dict[str, int]:
    """The bytes of each tensor of a checkpoint, in the order of `_whole_tensors`."""
    trained = model.trained_shapes().items()
    headers = {f"{_PARAMETER}.{name}": torch.empty(shape, device="meta") for name, shape in trained}
    return {name: header.nbytes for name, header in (headers | optimizer.moment_headers()).items()}


def _whole_tensors(model: TrainedModel, optimizer: PolicyOptimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, each gathered from the ranks when the iterator reaches the tensor."""
    for name, tensor in model.each_trained():
        yield f"{_PARAMETER}.{name}", tensor
    yield from optimizer.each_moment()


def read(store: ObjectStore, prefix: str, ranks: Ranks | None = None) -> Checkpoint:
    """The checkpoint below `prefix`, read into host memory; raises the errors of `opened`, CorruptObject included."""
    found = opened(store, prefix, ranks)

    def taken(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        return {name: each.read() if isinstance(each, Unread) else each for name, each in tensors.items()}

    parameters = taken(found.parameters)
    return Checkpoint(found.state, parameters, {kind: taken(tensors) for kind, tensors in found.moments.items()})


def opened(store: ObjectStore, prefix: str, ranks: Ranks | None = None) -> Checkpoint:
    """The checkpoint below `prefix`, whose tensors are read and verified when a caller takes each tensor, in order.

    With several ranks, every rank must call `opened` and take equal tensors in equal order; each rank gets its own
    rows.

    Raises:
        ObjectMissing: There is no checkpoint.
        CorruptObject: The object is not a trainer's checkpoint; or the checksum of a tensor fails when the tensor is
            taken.
    """
    ranks, key = ranks or Ranks(), layout.manifest(prefix)
    with ranks.failing_together():
        manifest = tensor_sets.read_manifest(store, prefix)
    if _STATE not in manifest.metadata:
        raise CorruptObject(key, f"metadata: no {_STATE!r}; allowed: manifests of checkpoints")
    state = canonical.decode(TrainerState, key, json.dumps(manifest.metadata[_STATE]).encode())
    _check_kinds(key, manifest)
    # A manifest has them in the order of their names, and a learner takes its parameters before the rest.
    ordered = sorted(manifest.tensors.items(), key=lambda each: not each[0].startswith(f"{_PARAMETER}."))
    sets: dict[str, dict[str, Stored]] = {}
    for full_name, tensor in unread(store, prefix, replace(manifest, tensors=dict(ordered)), ranks).items():
        kind, _, name = full_name.partition(".")
        sets.setdefault(kind, {})[name] = tensor
    return Checkpoint(state, sets.pop(_PARAMETER, {}), sets)


def restore(
    checkpoint: Checkpoint, model: TrainedModel, optimizer: PolicyOptimizer, field: str = "optimizer"
) -> TrainerState:
    """Restore model, optimizer and torch's CPU generator to their state in `checkpoint`.

    field: the section of the optimizer's configuration.

    Raises:
        ValueError: The checkpoint is of another optimizer or model (PolicyError if its parameters differ).
    """
    check_optimizer(checkpoint, optimizer, field)
    model.load_trained(checkpoint.parameters)
    optimizer.restore(checkpoint.state.optimizer_steps, checkpoint.moments)
    torch.set_rng_state(checkpoint.state.rng_tensor())
    return checkpoint.state


def check_optimizer(checkpoint: Checkpoint, optimizer: PolicyOptimizer, field: str = "optimizer") -> None:
    """Raise ValueError if the checkpoint is another kind of optimizer's; field: the section of its configuration."""
    if checkpoint.state.optimizer != optimizer.name:
        raise ValueError(
            f"{field}.name: value {optimizer.name!r}; allowed with this checkpoint: {checkpoint.state.optimizer!r}"
        )


def _check_kinds(key: str, manifest: tensor_sets.Manifest) -> None:
    for full_name, entry in manifest.tensors.items():
        if entry.dtype != _DTYPES.get(full_name.partition(".")[0]):
            allowed = ", ".join(f"{kind} ({dtype})" for kind, dtype in _DTYPES.items())
            raise CorruptObject(key, f"tensor {full_name!r} of {entry.dtype}; allowed: {allowed}")
