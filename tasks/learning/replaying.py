"""Replaying: brings a learner from an older checkpoint to a later version by training recorded batches again.

A train phase is a function of storage, so the replayed learner has the bits of the earlier trainers' learners. A replay
reads plans, settings, prompts and batches of the iterations, and tokens from the journal or from compacted parts.
Nothing is graded, recorded or published.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from resources.work_log import at_work
from storage.clock import Clock
from storage.records import layout, prompt_table
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from storage.records.run import read_plan
from storage.stores.store import ObjectStore
from storage.weights.stored_versions import restored_from
from storage.weights.tensor_sets import digest_all, read_manifest
from storage.weights.versions import pull_version
from tasks.configuration.iteration_config import check_trained_here, config_in_force
from tasks.configuration.run_config import RunConfig
from tasks.learning.correction import same_engine
from tasks.learning.learner import Learner
from tasks.learning.publication import Blocks, published_adapter, published_blocks
from tasks.learning.ranks import Ranks
from tasks.learning.recorded_batches import Batches, BatchReader
from tasks.learning.replayed_batches import ReplayedBatches, ReplayReader
from tasks.learning.restoring import restore_learner
from tasks.learning.trained_model import training_device
from tasks.learning.trainer import IterationTrainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The cost of a replay.

    Attributes:
        iterations: The number of iterations trained again.
        seconds: Seconds of the replay.
    """

    iterations: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """The metrics of a replay; {} without a replay."""
        if not self.iterations:
            return {}
        return {"replay/iterations": float(self.iterations), "timing_s/replay": self.seconds}


def learner_at(
    store: ObjectStore, version: int, config: RunConfig, model: Path, clock: Clock, ranks: Ranks | None = None
) -> tuple[Learner, Replayed]:
    """Restore the learner at `version`: from the newest checkpoint up to `version`, then by a replay. A collective."""
    ranks = ranks or Ranks(device=training_device(config.trainer.device))
    start = restorable(store, version, ranks)
    learner = restore_learner(store, start, config, model, clock, ranks)
    return learner, replay(store, learner, start, version, clock)


def restorable(store: ObjectStore, version: int, ranks: Ranks) -> int:
    """Collective version of `restored_from`: every rank calls it and gets rank 0's answer."""
    with ranks.failing_together():
        found = restored_from(store, version) if ranks.is_first else version
    return int(ranks.broadcast(found))


def replay(
    store: ObjectStore,
    learner: Learner,
    start: int,
    version: int,
    clock: Clock,
    on_begin: Callable[[int], None] = lambda _: None,
) -> Replayed:
    """Train the iterations from `start` to `version` again; every rank must call `replay`.

    Args:
        store: The run's store.
        learner: The learner at version `start`; at `version` afterwards.
        start: The version of the learner.
        version: The version to reach.
        clock: Measures the replay.
        on_begin: Called with the number of iterations, if above 0.

    Raises:
        ObjectMissing: An object of the iterations is missing; the error names the object.
        CorruptObject: An object of the iterations is damaged; the error names the object.
        TrainedOutside: An external trainer has trained an iteration.
    """
    if start == version:
        return Replayed()
    on_begin(version - start)
    began_s = clock.monotonic()
    for iteration in range(start, version):
        at_work(f"replaying iteration {iteration}, to restore weight version {version} from checkpoint {start}")
        log.info("replaying iteration %d, to restore version %d from checkpoint %d", iteration, version, start)
        plan = read_plan(store, iteration)
        config = config_in_force(store, plan)
        check_trained_here(store, iteration)
        prompts = prompt_table.read_prompts(store, plan)
        batches = ReplayedBatches(store, plan) if learner.ranks.is_first else None
        reader = None if learner.ranks.is_first else ReplayReader(store, plan)
        iteration_trainer(store, plan, config, prompts, learner, batches, clock, reader=reader).step()
    return Replayed(iterations=version - start, seconds=clock.monotonic() - began_s)


def iteration_trainer(
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    prompts: Sequence[PromptRow],
    learner: Learner,
    batches: Batches | None,
    clock: Clock,
    *,
    reader: BatchReader | None = None,
    started_at_s: float | None = None,
) -> IterationTrainer:
    """The trainer of a run's iteration, for the first training or a replay."""
    published = {entry.dtype for entry in read_manifest(store, layout.weights(0)).tensors.values()}
    return IterationTrainer(
        store,
        plan,
        prompts=prompts,
        learner=learner,
        batches=batches,
        reader=reader,
        algorithm=config.algorithm,
        trainer=config.trainer,
        clock=clock,
        started_at_s=started_at_s,
        # Stored responses of other runs come from other weights, whatever the engine.
        same_engine=config.data.replay is None and same_engine(config.rollout, config.trainer, published),
        teacher=config.teacher,
    )


def base_of(
    store: ObjectStore, version: int, learner: Learner, replayed: Replayed, clock: Clock
) -> tuple[Blocks, dict[str, float]]:
    """Return the tensors of `version`, the base of the next version's differences, and metrics; for the first rank.

    A replay on a GPU, or with another number of ranks, may end with last bits that differ from the published tensors.
    Differences must refer to published tensors. Adapters refer to version 0 and need no base.
    """
    is_adapter = published_adapter(learner.policy) is not None
    if is_adapter and not replayed.iterations:
        return {}, {}
    blocks = published_blocks(store, learner.policy, learner.ranks, lasting=True)
    if not replayed.iterations or not learner.ranks.is_first:
        return blocks, {}
    entries = read_manifest(store, layout.weights(version)).tensors
    changed = sum(digest != entries[name].digest for name, digest in digest_all(blocks).items())
    if changed:
        log.warning("%d of %d tensors of the replayed version %d have other last bits", changed, len(blocks), version)
        if not is_adapter:
            blocks = pull_version(store, version, None, clock)[1]
    return {} if is_adapter else blocks, {"replay/tensors_changed": float(changed)}
