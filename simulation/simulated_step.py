"""The training step of a simulated run: a function of the recorded batches, published by the production code.

The weights count which responses were trained, with what reward and how long, so the judge computes them again from the
batch records. `steps` holds the version, by which an engine knows what it was given.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from storage import layout, records
from storage.clock import Clock
from storage.records import BatchRecord, PlanRecord, TrainingRecord
from storage.run import exists
from storage.store import ObjectStore
from storage.weights.manifest import PUBLISHED_AT_S, TensorBlock
from storage.weights.tensor_sets import publish, pull
from storage.weights.versions import publish_version, pull_version

Blocks = Mapping[str, TensorBlock]
SIZE = 64
# Every version is stored whole at this interval; the runs of one kind never reach the second.
FULL_INTERVALS = (2, 10)


def first_weights() -> Blocks:
    """Weight version 0."""
    return {"steps": _block([0]), "counts": _block([0] * SIZE), "frozen": _block([7] * 8)}


def stepped(weights: Blocks, batches: Sequence[BatchRecord]) -> Blocks:
    """The weights after one more iteration, whose batches these are."""
    counts = np.frombuffer(weights["counts"].data, np.uint32).copy()
    for batch in batches:
        for graded in batch.responses:
            counts[(7 * graded.response + graded.length) % SIZE] += 1 + batch.number + int(graded.reward or 0)
    return {**weights, "counts": _block(counts.tolist()), "steps": _block([version_of(weights) + 1])}


def version_of(weights: Blocks) -> int:
    """The weight version that these tensors are."""
    return int(np.frombuffer(weights["steps"].data, np.uint32)[0])


def restored(store: ObjectStore, version: int, clock: Clock) -> Blocks:
    """The trainer's state after `version` iterations; raises ObjectMissing if it was not saved."""
    if version == 0:
        return pull_version(store, 0, None, clock)[1]
    return pull(store, layout.checkpoint(version))[1]


def publish_first(store: ObjectStore) -> None:
    """Publish weight version 0."""
    publish(store, layout.weights(0), first_weights(), {})


def is_done(store: ObjectStore, plan: PlanRecord) -> bool:
    """Whether another life has published what the iteration trains, which may have been swept since."""
    done = (layout.manifest(layout.weights(plan.iteration + 1)), layout.report(plan.iteration))
    return any(exists(store, key) for key in done)


def save_and_publish(
    store: ObjectStore,
    plan: PlanRecord,
    base: Blocks,
    batches: Sequence[BatchRecord],
    clock: Clock,
    *,
    began_at_s: float,
    took_s: float,
) -> None:
    """Note what was measured, save the state after these batches, and publish it as weights, in production's order.

    began_at_s: by the wall clock. took_s: how long the life has lasted.
    """
    version = plan.iteration + 1
    weights = stepped(base, batches)
    measured = TrainingRecord(
        iteration=plan.iteration,
        weight_version=version,
        metrics={"timing_s/wait": 0.0, "timing_s/train": took_s},
        reward_errors=(),
        started_at_s=began_at_s,
        ended_at_s=clock.wall(),
    )
    records.commit(store, layout.training(plan.iteration), measured)

    def save() -> Mapping[str, float]:
        publish(store, layout.checkpoint(version), weights, {})
        return {PUBLISHED_AT_S: clock.wall()}

    publish_version(store, version, weights, {}, base=base, full_interval=_full_interval(plan), before_manifest=save)


def publish_saved(store: ObjectStore, plan: PlanRecord, clock: Clock) -> None:
    """Publish the weights whose state an earlier life saved."""
    version = plan.iteration + 1
    weights = restored(store, version, clock)
    base = pull_version(store, plan.iteration, None, clock)[1]
    metadata = {PUBLISHED_AT_S: clock.wall()}
    publish_version(store, version, weights, metadata, base=base, full_interval=_full_interval(plan))


def _full_interval(plan: PlanRecord) -> int:
    return FULL_INTERVALS[plan.run_seed % len(FULL_INTERVALS)]


def _block(values: Sequence[int]) -> TensorBlock:
    return TensorBlock("U32", (len(values),), np.array(values, np.uint32).tobytes())
