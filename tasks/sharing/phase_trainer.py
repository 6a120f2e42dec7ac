"""Training the phases of a run, in a process or in several ranks, with the run's state kept in memory between phases.

A phase learns exactly as `tasks.learning.train_iteration` does: equal batches, an equal step, and equal objects, each
created once. The collector records the batches, never this process. A state in host memory, parked after a phase or
read ahead, is used if equal to the stored state; otherwise the state is read or replayed. Each of several ranks keeps
a part of the state.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from resources.process import give_back_memory
from storage.clock import Clock, SystemClock
from storage.digests import digest_of
from storage.records import layout, model_files, prompt_table, records
from storage.records.records import PlanRecord
from storage.records.run import connect_to_run, exists, is_trained, read_plan
from storage.stores.metered import MeteredStore
from storage.stores.store import ObjectMissing, ObjectStore, StorageError, StoreUnavailable
from storage.weights.tensor_sets import PUBLISHED_AT_S, read_manifest
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.run_config import RunConfig, dump
from tasks.device.gpu_check import check_gpus
from tasks.learning.checkpoint_due import is_checkpoint_due
from tasks.learning.generation import free_device
from tasks.learning.learner import Learner
from tasks.learning.parking import Parked, park, unpark
from tasks.learning.publication import AnotherWasFirstError, Blocks, publish_and_save
from tasks.learning.ranks import RankError, Ranks, joined, misses_peer
from tasks.learning.recorded_batches import FollowedBatches
from tasks.learning.replaying import base_of, replay, restorable
from tasks.learning.restoring import StoredState, learner_of, restore_learner
from tasks.learning.totals import check_staleness
from tasks.learning.train_iteration import request_metrics, take_step
from tasks.learning.trained_model import training_device
from tasks.sharing.residents import is_usable
from tasks.sharing.workers import Restored, WorkerPhase, WorkerState

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class NoLongerDue(Exception):  # noqa: N818 - reads as what happened
    """The iteration was concluded while this process waited for its batches."""


class OtherDevice(Exception):  # noqa: N818 - reads as what happened
    """The run trains on a different kind of device than at the start of this process; a new process can follow."""


def is_lasting(error: Exception) -> bool:
    """Whether an error of `PhaseTrainer.train` would end every attempt at the phase."""
    return not isinstance(error, StoreUnavailable | NoLongerDue | OtherDevice) and not misses_peer(error)


@dataclass(frozen=True)
class _Kept:
    """A state in host memory that equals a stored state.

    Attributes:
        state: The parked learner, or the tensors that were read ahead.
        digest: `state_digest` of the stored state.
        config: The configuration of the learner.
    """

    state: Parked | StoredState
    digest: str
    config: RunConfig


def state_digest(store: ObjectStore, version: int) -> str:
    """Identify the stored state from which iteration `version` trains, by a digest of the manifests.

    The digest covers policy and critic, because two trainers may each have stored one half of a version. A version
    without a checkpoint is identified by the weights: a replay leads to equal bits. Raises ObjectMissing if the state
    is not stored.
    """
    try:
        body = store.get(layout.manifest(layout.checkpoint(version)))
    except ObjectMissing:
        return digest_of(store.get(layout.manifest(layout.weights(version))))
    try:
        critic = store.get(layout.manifest(layout.critic_checkpoint(version)))
    except ObjectMissing:
        critic = b""
    return digest_of(body + critic)


class PhaseTrainer:
    """Trains phases of a single run, one at a time. Not thread-safe; the process trains no second run.

    A checkpoint holds the state of torch's generator, of which a process has a single copy: two runs in a process would
    mix their generators. Each rank has a PhaseTrainer, and all ranks call equal methods in equal order.
    """

    def __init__(
        self,
        run_url: str,
        clock: Clock,
        tell: Callable[[WorkerState], None],
        ranks: Ranks | None = None,
    ) -> None:
        """tell: called with the state at every change of the phase. ranks: None means this process alone."""
        self._ranks = ranks or Ranks(device=training_device("auto"))
        self._store = MeteredStore(connect_to_run(run_url))
        self._clock = clock
        # When the process began, or its last phase ended.
        self._free_since_s = clock.wall()
        self._tell = tell
        self._iteration: int | None = None
        self._phase: WorkerPhase = "parked"
        self._kept: _Kept | None = None
        # What was kept when the phase began, until its learner is chosen.
        self._taken: _Kept | None = None
        self._restored: Restored | None = None
        self._replays = 0

    def train(self, iteration: int) -> None:
        """Train and publish the phase of an iteration, unless the weights are published already.

        Afterwards the device is free, and the state is in host memory if the state equals the stored state. Raises the
        errors of `tasks.learning.train_iteration`, with the state dropped. With several ranks also raises NoLongerDue,
        after which no rank can go on.
        """
        self._iteration, self._restored, self._replays = iteration, None, 0
        self._says("restoring")
        self._taken, self._kept = self._kept, None
        try:
            if not self._first_finds(lambda: is_trained(self._store, iteration)):
                self._kept = self._train(iteration)
            elif self._is_next(self._taken, iteration + 1):
                self._kept = self._taken
        except (NoLongerDue, StorageError, RankError) as error:
            # A concluded iteration needs no object any more, so a missing object, on any rank, is no error.
            if not isinstance(error, NoLongerDue) and not exists(self._store, layout.report(iteration)):
                raise
            log.info("iteration %d is concluded; nothing of this phase is used", iteration)
            if self._ranks.world_size > 1:
                raise NoLongerDue(f"iteration {iteration} is concluded") from error
        finally:
            self._taken = None
            self._free_since_s = self._clock.wall()
            give_back_memory()
        self._says("parked")

    def prefetch(self, iteration: int) -> None:
        """Read the state from which an iteration trains into host memory, unless present; the device stays free.

        A failed read is logged, and left to the phase.
        """
        self._iteration, self._restored, self._replays = iteration, None, 0
        self._says("prefetching")
        if not self._is_next(self._kept, iteration):
            self._kept = None
            give_back_memory()
            try:
                with self._ranks.failing_together():
                    plan = read_plan(self._store, iteration)
                    config = config_in_force(self._store, plan)
                digest = self._digest(iteration)
                version = restorable(self._store, iteration, self._ranks)
                state = StoredState(self._store, version, self._clock, self._ranks)
                self._note_restored(lambda: state.read_ahead(config), ahead=True)
                self._kept = _Kept(state, digest, config)
            except (StorageError, ValueError, RankError) as error:
                log.warning("the state of iteration %d was not read ahead: %s", iteration, error)
        self._says("parked")

    def _first_finds(self, look: Callable[[], bool]) -> bool:
        """Call `look` on rank 0 and broadcast the result to all ranks."""
        ranks = self._ranks
        with ranks.failing_together():
            found = ranks.is_first and look()
        return bool(ranks.broadcast(found))

    def _train(self, iteration: int) -> _Kept | None:
        store, clock, ranks = self._store, self._clock, self._ranks
        plan = read_plan(store, iteration)
        config = config_in_force(store, plan)
        check_staleness(plan, config.algorithm.max_staleness)
        check_gpus("pools.train", config.pools.train.gpus, config.trainer.device)
        if training_device(config.trainer.device).type != ranks.device.type:
            raise OtherDevice(f"trainer.device: value {config.trainer.device!r}; this process has {ranks.device.type}")
        stands, ordered_s = config.trainer.placement == "standing", clock.wall()
        stood_s = self._stood_s(iteration, ordered_s) if stands and ranks.is_first else 0.0
        with model_files.downloaded(store) as model:
            learner, version, is_warm = self._state(config, iteration, model)
            began_s = clock.wall()
            replayed = replay(store, learner, version, iteration, clock, self._replay_begins)
        base, changed = base_of(store, iteration, learner, replayed, clock)
        batches = None
        if ranks.is_first:
            batches = FollowedBatches(store, plan, clock, config.rollout.poll_interval_s, self._waits)
        prompts = prompt_table.read_prompts(store, plan)
        self._says("training")
        record = take_step(store, plan, config, prompts, learner, batches, clock, ordered_s if stands else began_s)
        measured = request_metrics(store.requests, ranks) | {"sharing/warm": float(is_warm)}
        measured |= replayed.metrics() | changed
        if stands:
            measured |= {"timing_s/restore": began_s - ordered_s, "timing_s/stood": stood_s}
        if ranks.is_first:
            records.commit(store, layout.training(iteration), replace(record, metrics=record.metrics | measured))
        return self._park_and_publish(plan, config, learner, base)

    def _state(self, config: RunConfig, version: int, model: Path) -> tuple[Learner, int, bool]:
        """A learner on the device, the learner's version, and whether the state was in host memory.

        The learner's version is at most `version`; a replay of the iterations between leads to `version`.
        """
        kept, self._taken = self._taken, None
        same_settings = kept is not None and dump(kept.config) == dump(config)
        if not self._is_next(kept if same_settings else None, version) or kept is None:
            store, clock, ranks = self._store, self._clock, self._ranks
            # A device need not have room for two learners.
            kept = None
            free_device(ranks.device)
            start = restorable(store, version, ranks)
            learner = self._note_restored(lambda: restore_learner(store, start, config, model, clock, ranks))
            return learner, start, False
        began_s, state, num_bytes = self._clock.monotonic(), kept.state, kept.state.num_bytes
        learner = unpark(state) if isinstance(state, Parked) else learner_of(state, config, model, self._ranks)
        took_s = self._clock.monotonic() - began_s
        self._restored = Restored(tier="host memory", seconds=took_s, num_bytes=num_bytes, ahead=False)
        return learner, version if isinstance(state, Parked) else state.version, True

    def _stood_s(self, iteration: int, now_s: float) -> float:
        """Seconds since the last iteration was published from here, or else since this process was free."""
        since_s, kept = self._free_since_s, self._taken
        if kept is not None and isinstance(kept.state, Parked):
            since_s = read_manifest(self._store, layout.weights(iteration)).metadata.get(PUBLISHED_AT_S) or now_s
        return max(0.0, now_s - float(since_s))

    def _replay_begins(self, iterations: int) -> None:
        self._replays = iterations
        self._says("replaying")

    def _note_restored(self, read: Callable[[], Result], *, ahead: bool = False) -> Result:
        """The result of `read`, which reads a state from the object store; notes the seconds and bytes of the read."""
        began_s, read_before = self._clock.monotonic(), self._store.requests.bytes_read
        found = read()
        took_s, num_bytes = self._clock.monotonic() - began_s, self._store.requests.bytes_read - read_before
        self._restored = Restored(tier="object store", seconds=took_s, num_bytes=num_bytes, ahead=ahead)
        return found

    def _digest(self, version: int) -> str:
        """Collective `state_digest`: rank 0 reads the digest for all ranks. Raises as `Ranks.failing_together`."""
        ranks = self._ranks
        with ranks.failing_together():
            digest = state_digest(self._store, version) if ranks.is_first else ""
        return str(ranks.broadcast(digest))

    def _is_next(self, kept: _Kept | None, version: int) -> bool:
        """Whether all ranks keep the stored state of `version`. Rank 0 reads the digest if every rank keeps a state."""
        ranks = self._ranks
        if not all(ranks.gather(kept is not None)) or kept is None:
            return False
        found = None
        with ranks.failing_together():
            if ranks.is_first:
                with suppress(ObjectMissing):
                    found = state_digest(self._store, version)
        found = ranks.broadcast(found)
        return all(ranks.gather(found is not None and is_usable(kept.digest, found)))

    def _park_and_publish(self, plan: PlanRecord, config: RunConfig, learner: Learner, base: Blocks) -> _Kept | None:
        """Free the device, then make the step durable from host memory.

        The run's node goes on when the weights are published, so the checkpoint is written beside the next rollout.
        Returns None if a second trainer has stored different bits first.
        """
        self._says("parking")
        # A run that has its devices for itself leaves its state there.
        parked = park(learner, moves=config.trainer.placement != "standing")
        self._says("publishing")
        version = plan.iteration + 1
        saves = self._first_finds(lambda: is_checkpoint_due(self._store, plan, config.trainer))
        try:
            publish_and_save(self._store, version, learner, base, self._clock, saves=saves)
        except AnotherWasFirstError:
            log.info("another trainer has stored version %d first; this state is dropped", version)
            return None
        return _Kept(parked, self._digest(version), config)

    def _waits(self, waiting: bool) -> None:
        if waiting and exists(self._store, layout.report(self._iteration or 0)):
            raise NoLongerDue
        self._says("waiting" if waiting else "training")

    def _says(self, phase: WorkerPhase) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        kept = self._kept
        self._tell(
            WorkerState(
                phase=phase,
                iteration=self._iteration,
                digest=None if kept is None else kept.digest,
                bytes_held=0 if kept is None else kept.state.num_bytes,
                restored=self._restored,
                replays=self._replays,
            )
        )


@contextmanager
def joined_trainer(
    run_url: str, iteration: int, folder: Path, tell: Callable[[WorkerState], None]
) -> Iterator[PhaseTrainer]:
    """The trainer of this rank, on the device that the configuration of an iteration names, until the end of the block.

    folder: the rendezvous of the ranks. Raises the errors of reading the configuration, and of `joined`.
    """
    store = connect_to_run(run_url)
    config = config_in_force(store, read_plan(store, iteration))
    with joined(training_device(config.trainer.device), folder) as ranks:
        yield PhaseTrainer(run_url, SystemClock(), tell, ranks)
