"""The training step of a simulated run: a function of the recorded batches, published by the production code.

The weights count which responses were trained, with what reward and how long, so the judge computes them again from the
batch records. `steps` holds the version, for an engine to recognise its weights. `bits` stands for the last bits of a
step, in which one life of a trainer may differ from another. Weight versions are published whole and as differences, or
as an adapter whose factors hold the same numbers.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from simulation.simulated_history import History
from storage.clock import Clock
from storage.journal.noise_keys import mix64
from storage.records import layout, records
from storage.records.records import BatchRecord, PlanRecord, TrainingRecord
from storage.records.run import exists
from storage.stores.store import ConflictingRecord, ObjectStore
from storage.weights.adapters import FIRST, SECOND, WEIGHT, AdapterRecord, publish_adapter
from storage.weights.manifest import PUBLISHED_AT_S, TensorBlock
from storage.weights.tensor_sets import publish, pull
from storage.weights.versions import publish_version, pull_version
from tasks.configuration.run_config import parse
from tasks.learning.correction import importance_mode, same_engine

Blocks = Mapping[str, TensorBlock]
SIZE = 64
LAYER, RANK = "adapted", 2
OUTPUTS = 4
# Every version is stored whole at this interval; the runs of one kind never reach the second.
FULL_INTERVALS = (2, 10)


def first_weights() -> Blocks:
    """Weight version 0."""
    adapted = np.zeros((OUTPUTS, SIZE), np.float32)
    return {
        "steps": _block([0]),
        "bits": _block([0]),
        "counts": _block([0] * SIZE),
        "frozen": _block([7] * 8),
        LAYER + WEIGHT: TensorBlock("F32", adapted.shape, adapted.tobytes()),
    }


def stepped(weights: Blocks, batches: Sequence[BatchRecord], bits: int = 0) -> Blocks:
    """The weights after a further iteration with these batches; bits: the last bits of this computation."""
    counts = np.frombuffer(weights["counts"].data, np.uint32).copy()
    for batch in batches:
        for graded in batch.responses:
            counts[(7 * graded.response + graded.length) % SIZE] += 1 + batch.number + int(graded.reward or 0)
    changed = {"counts": _block(counts.tolist()), "steps": _block([version_of(weights) + 1]), "bits": _block([bits])}
    return {**weights, **changed}


def version_of(weights: Blocks) -> int:
    """The weight version that these tensors are, whole or as an adapter."""
    if "steps" in weights:
        return int(np.frombuffer(weights["steps"].data, np.uint32)[0])
    return int(np.frombuffer(weights[LAYER + SECOND].data, np.float32)[0])


def bits_of(weights: Blocks) -> Blocks:
    """The part of the weights, whole or as an adapter, that may differ between computations."""
    if "bits" in weights:
        return {"bits": weights["bits"]}
    return {"bits": _block([int(np.frombuffer(weights[LAYER + SECOND].data, np.float32)[1])])}


def factors_of(weights: Blocks) -> Blocks:
    """The adapter that stands for these weights."""
    first, second = np.zeros((RANK, SIZE), np.float32), np.zeros((OUTPUTS, RANK), np.float32)
    first[0] = np.frombuffer(weights["counts"].data, np.uint32)
    second[0] = [version_of(weights), np.frombuffer(weights["bits"].data, np.uint32)[0]]
    return {
        LAYER + end: TensorBlock("F32", each.shape, each.tobytes()) for end, each in ((FIRST, first), (SECOND, second))
    }


def restored(store: ObjectStore, version: int, clock: Clock) -> Blocks:
    """The trainer's state after `version` iterations; raises ObjectMissing if it was not saved."""
    if version == 0:
        return pull_version(store, 0, None, clock)[1]
    return pull(store, layout.checkpoint(version))[1]


def publish_first(store: ObjectStore) -> None:
    """Publish weight version 0."""
    publish(store, layout.weights(0), first_weights(), {})


def is_done(store: ObjectStore, plan: PlanRecord) -> bool:
    """True if a life of the trainer has published the iteration's weights, which may be swept already."""
    done = (layout.manifest(layout.weights(plan.iteration + 1)), layout.report(plan.iteration))
    return any(exists(store, key) for key in done)


def lacks_state(store: ObjectStore, plan: PlanRecord) -> bool:
    """Whether what the iteration trains was published by a life that did not come to save its state."""
    stored = (layout.manifest(layout.checkpoint(plan.iteration + 1)), layout.report(plan.iteration))
    return not any(exists(store, key) for key in stored)


def publish_and_save(
    store: ObjectStore,
    history: History,
    base: Blocks,
    batches: Sequence[BatchRecord],
    clock: Clock,
    *,
    life: str,
    stalls_s: float,
    began_at_s: float,
    took_s: float,
) -> None:
    """Note the measurements, publish the weights after these batches, and save the state, in production's order.

    A second life may have published or saved different last bits first; stored objects stay. life: name of this life.
    stalls_s: seconds of standing still after publishing. began_at_s: by the wall clock. took_s: seconds that the life
    has lasted.
    """
    plan = history.plan
    version = plan.iteration + 1
    weights = trained(history, base, batches, life)
    measured = TrainingRecord(
        iteration=plan.iteration,
        weight_version=version,
        metrics={"timing_s/wait": 0.0, "timing_s/train": took_s, **_corrections(plan)},
        reward_errors=(),
        started_at_s=began_at_s,
        ended_at_s=clock.wall(),
    )
    records.commit(store, layout.training(plan.iteration), measured)
    with suppress(ConflictingRecord):
        _publish(store, history, weights, base, clock)
    clock.sleep(stalls_s)
    save(store, version, weights)


def trained(history: History, base: Blocks, batches: Sequence[BatchRecord], life: str) -> Blocks:
    """The state after these batches, as a life of the trainer computes it."""
    return stepped(base, batches, _last_bits(life, history.plan.iteration + 1) if history.inexact else 0)


def save(store: ObjectStore, version: int, weights: Blocks) -> None:
    """Save a state, unless another life's is there."""
    with suppress(ConflictingRecord):
        publish(store, layout.checkpoint(version), weights, {})


def _publish(store: ObjectStore, history: History, weights: Blocks, base: Blocks, clock: Clock) -> None:
    version, metadata = history.plan.iteration + 1, {PUBLISHED_AT_S: clock.wall()}
    if history.adapts:
        record = AdapterRecord(rank=RANK, alpha=1.0)
        publish_adapter(store, version, factors_of(weights), record, metadata)
        return
    interval = _full_interval(history.plan)
    publish_version(store, version, weights, metadata, base=base, full_interval=interval)


def _last_bits(life: str, version: int) -> int:
    """Some number of a life that float32 holds, too."""
    return mix64(int.from_bytes(life.encode()) % (1 << 64) + version) % (1 << 20)


def _corrections(plan: PlanRecord) -> Mapping[str, float]:
    """Importance weights as production measures them, if any; the simulated engine is as exact as the trainer."""
    config = parse(plan.config)
    is_same = same_engine(config.rollout, config.trainer, {"F32"})
    return {} if importance_mode(config.algorithm, same_engine=is_same) is None else {"importance/ess": 1.0}


def _full_interval(plan: PlanRecord) -> int:
    return FULL_INTERVALS[plan.run_seed % len(FULL_INTERVALS)]


def _block(values: Sequence[int]) -> TensorBlock:
    return TensorBlock("U32", (len(values),), np.array(values, np.uint32).tobytes())
