"""Advancing a run by one weight version: restore the learner, train one iteration, make the result durable.

Work of earlier attempts is not repeated: published weights, a written checkpoint, recorded batches. The task ends only
after writing a checkpoint that is due, because the process ends with the task, and the state in memory with the
process.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from resources.granted import check_granted
from resources.process import give_back_memory
from resources.work_log import at_work
from storage.clock import Clock
from storage.records import layout, model_files, prompt_table, records
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord, TrainingRecord
from storage.records.run import ConcludedByAnother, connect_to_run, exists, is_trained, read_plan
from storage.stores.connect import connect
from storage.stores.metered import MeteredStore, Requests
from storage.stores.store import ObjectStore, StorageError
from storage.weights.stored_versions import restored_checkpoint, restored_from
from storage.weights.tensor_sets import published_bytes
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.run_config import RunConfig
from tasks.device.gpu_check import check_gpus
from tasks.learning.checkpoint import TrainerState
from tasks.learning.checkpoint_due import is_checkpoint_due
from tasks.learning.generation import Generation, free_device
from tasks.learning.learner import Learner
from tasks.learning.lease import keep_lease
from tasks.learning.nonfinite import keep_nonfinite
from tasks.learning.opened_batches import opened_batches
from tasks.learning.optimizer import NonFiniteGradient
from tasks.learning.publication import (
    AnotherWasFirstError,
    publish_and_save,
    save,
)
from tasks.learning.ranks import Ranks, joined
from tasks.learning.recorded_batches import Batches
from tasks.learning.replaying import base_of, iteration_trainer, learner_at
from tasks.learning.totals import check_staleness
from tasks.learning.trained_model import training_device
from tasks.sampling.session.crew_watch import CrewWatch, LeftAlone

log = logging.getLogger(__name__)


def train_iteration(
    run_url: str, iteration: int, execution: str, clock: Clock, folder: Path | None = None
) -> TrainingRecord:
    """Train an iteration, publish the next weight version and return the training record.

    If the version is published already, the record is returned, after writing a checkpoint that is due and missing.
    With several ranks, every rank calls `train_iteration`. After an error that makes the step impossible, nothing is
    published, and the next attempt replays the recorded batches.

    Args:
        run_url: The run's store.
        iteration: The number of the iteration.
        execution: The execution that holds the run's lease.
        clock: The clock of waits and records.
        folder: The meeting folder of ranks on one machine, as for `joined`; None elsewhere.

    Raises:
        TooStaleError, GroupTimeout, GradingError, NonFiniteGradient, CorruptObject: The step is impossible.
        EngineDied: The trainer's machine alone generates, and its engine has died.
        CrewLost: No process can generate the missing responses.
        ConcludedByAnother: The iteration was concluded meanwhile, as after a long freeze.
        WrongGpus: The machine's GPUs are not as pools.train says.
    """
    started_at_s = clock.wall()
    store = MeteredStore(connect_to_run(run_url))
    plan = read_plan(store, iteration)
    config = config_in_force(store, plan)
    check_granted(
        f"training of iteration {iteration} of {run_url}",
        "train",
        config.pools.train,
        lambda: _stored_bytes(store, iteration) // config.trainer.nnodes,
        "the stored state, of which every process reads a share,",
    )
    check_gpus("pools.train", config.pools.train.gpus, config.trainer.device)
    with joined(training_device(config.trainer.device), folder) as ranks, ExitStack() as stack:
        if ranks.is_first:
            stack.enter_context(keep_lease(store, execution, config.run.lease_ttl_s, clock))
        is_done = ranks.broadcast(ranks.is_first and is_trained(store, iteration))
        if not is_done or ranks.broadcast(ranks.is_first and _lacks_checkpoint(store, plan, config)):
            check_staleness(plan, config.algorithm.max_staleness)
            model = stack.enter_context(model_files.downloaded(store))
            try:
                if is_done:
                    _save_again(store, iteration + 1, config, model, clock, ranks)
                else:
                    _train_and_publish(store, plan, config, model, execution, clock, started_at_s, ranks)
            except StorageError as error:
                # What is missing then was deleted because nobody needs it any more.
                if not exists(store, layout.report(iteration)):
                    raise
                raise ConcludedByAnother(iteration, "trained it") from error
    # On one machine the process goes on with the next iteration.
    give_back_memory()
    return records.read(store, TrainingRecord, layout.training(iteration))


def _train_and_publish(
    store: MeteredStore,
    plan: PlanRecord,
    config: RunConfig,
    model: Path,
    execution: str,
    clock: Clock,
    started_at_s: float,
    ranks: Ranks,
) -> None:
    # Iteration n trains weight version n, whichever version its tokens were sampled from.
    before, version = plan.iteration, plan.iteration + 1
    generation = Generation(connect(store.url), plan, config, execution, clock, ranks)
    generation.begin()
    dropped_s = 0.0
    while True:
        began_s = clock.monotonic()
        at_work(f"restoring the state of weight version {before}")
        learner, replayed = learner_at(store, before, config, model, clock, ranks)
        restore_s = clock.monotonic() - began_s - replayed.seconds
        base, changed = base_of(store, before, learner, replayed, clock)
        watch = generation.watch()
        try:
            record = _step(store, plan, config, model, clock, started_at_s, learner, watch)
            break
        except LeftAlone as error:
            log.warning("%s; the trainer's machines generate", error)
        # The engine needs the device. The recorded batches are trained again afterwards.
        del learner, base
        free_device(ranks.device)
        dropped_s += clock.monotonic() - began_s
        generation.again()
    # The time of a dropped learner counts as waiting, not as training.
    waited = {"timing_s/wait": record.metrics["timing_s/wait"] + dropped_s, "timing_s/restore": restore_s}
    measured = waited | replayed.metrics() | changed | request_metrics(store.requests, ranks) | generation.metrics()
    record = replace(record, metrics=record.metrics | measured)
    if ranks.is_first:
        records.commit(store, layout.training(plan.iteration), record)
    at_work(f"publishing weight version {version}")
    saves = ranks.broadcast(ranks.is_first and is_checkpoint_due(store, plan, config.trainer))
    try:
        publish_and_save(store, version, learner, base, clock, saves=saves)
    except AnotherWasFirstError as error:
        log.info("another trainer has stored weight version %d first: %s", version, error)


def _lacks_checkpoint(store: ObjectStore, plan: PlanRecord, config: RunConfig) -> bool:
    """Whether an iteration's checkpoint is due and missing, because the trainer was lost after publishing the weights.

    False for a committed iteration, whose checkpoint may have been deleted.
    """
    stored = (layout.manifest(layout.checkpoint(plan.iteration + 1)), layout.report(plan.iteration))
    return not any(exists(store, key) for key in stored) and is_checkpoint_due(store, plan, config.trainer)


def _save_again(store: ObjectStore, version: int, config: RunConfig, model: Path, clock: Clock, ranks: Ranks) -> None:
    """Write the checkpoint of a published version by a replay, which ends with the state behind the weights."""
    at_work(f"writing the checkpoint of weight version {version}, which a lost trainer has not written")
    learner, _ = learner_at(store, version, config, model, clock, ranks)
    save(store, version, learner, TrainerState.capture(version, learner.optimizer), clock)


def _stored_bytes(store: ObjectStore, iteration: int) -> int:
    """The bytes of the state from which the training of an iteration is restored."""
    found = restored_checkpoint(store, restored_from(store, iteration))
    return published_bytes(store, found or layout.weights(0))


def request_metrics(requests: Requests, ranks: Ranks) -> dict[str, float]:
    """The requests of all ranks to the store so far, as metrics; every rank must call `request_metrics`."""
    asked = sum((Requests(**each) for each in ranks.gather(asdict(requests))), Requests())
    return {f"requests/train_{name}": float(count) for name, count in asdict(asked).items()}


def _step(
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    model: Path,
    clock: Clock,
    started_at_s: float,
    learner: Learner,
    watch: CrewWatch,
) -> TrainingRecord:
    prompts = prompt_table.read_prompts(store, plan)
    with ExitStack() as stack:
        batches = None
        if learner.ranks.is_first:
            batches = stack.enter_context(opened_batches(store, plan, config, prompts, model, clock, watch.check))
        return take_step(store, plan, config, prompts, learner, batches, clock, started_at_s)


def take_step(
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    prompts: Sequence[PromptRow],
    learner: Learner,
    batches: Batches | None,
    clock: Clock,
    started_at_s: float,
) -> TrainingRecord:
    """Advance the learner by the iteration's optimizer steps, as `IterationTrainer.step`.

    After a non-finite gradient, the reason is stored for people.
    """
    with ExitStack() as stack:
        stack.enter_context(_recorded_before_the_end(learner.ranks))
        if learner.ranks.is_first:
            stack.enter_context(keep_nonfinite(store, plan))
        return iteration_trainer(
            store, plan, config, prompts, learner, batches, clock, started_at_s=started_at_s
        ).step()


@contextmanager
def _recorded_before_the_end(ranks: Ranks) -> Iterator[None]:
    """On NonFiniteGradient, keep every rank alive until the first rank has recorded the error.

    The launcher ends every rank when a rank ends. Every rank raises the error with the first rank's message.
    """
    try:
        yield
    except NonFiniteGradient as error:
        error.args = (ranks.broadcast(str(error)),)
        raise
