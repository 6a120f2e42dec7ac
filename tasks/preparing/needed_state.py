"""The stored state that training an iteration will read, checked ahead of paying for the iteration's rollout."""

from collections.abc import Collection

from storage.records import layout, records
from storage.records.records import BatchRecord
from storage.records.run import ConcludedByAnother, is_trained, next_iteration, read_plan, release_lease
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from storage.weights.inspection import inspect_set
from storage.weights.stored_versions import restored_checkpoint, restored_from
from tasks.configuration.iteration_config import TrainedOutside, check_trained_here, config_in_force
from tasks.configuration.run_config import RunConfig


def check_needed_state(store: ObjectStore, config: RunConfig, iteration: int, execution: str) -> None:
    """Look at the checkpoints, the pretrained weights and the recorded batches that training `iteration` restores from.

    Reads no state for the first iteration, whose weights each member verifies, or if the iteration is trained already.
    Raises ObjectMissing or CorruptObject, which names the damaged object, or TrainedOutside, with the lease of
    `execution` released; or ConcludedByAnother, if the objects are gone because the iteration was concluded meanwhile.
    """
    if config.trainer.is_external:
        return
    try:
        if is_trained(store, iteration):
            # Its checkpoint may be missing, and is then written after a replay.
            check_trained_here(store, iteration)
        elif iteration:
            _check_restored(store, config, iteration)
    except (CorruptObject, ObjectMissing, TrainedOutside) as error:
        if next_iteration(store) != iteration:
            raise ConcludedByAnother(iteration, "planned it") from error
        release_lease(store, execution)
        raise


def _check_restored(store: ObjectStore, config: RunConfig, iteration: int) -> None:
    version = restored_from(store, iteration)
    state = restored_checkpoint(store, version)
    if state is not None:
        inspect_set(store, state)
        if config.algorithm.estimator.needs_critic:
            inspect_set(store, layout.critic_checkpoint(version))
    if state is None or config.lora is not None or config.algorithm.needs_reference:
        inspect_set(store, layout.weights(0))
    for replayed in range(version, iteration):
        check_trained_here(store, replayed)
        check_replayable(store, replayed)


def check_replayable(store: ObjectStore, iteration: int) -> None:
    """Raise CorruptObject unless, by the names of its objects, a committed iteration can be trained again."""
    keys = set(store.list(layout.iteration(iteration)))
    batches = [key for key in keys if key.startswith(layout.batches(iteration))]
    numbered = [layout.batch(iteration, number) for number in range(max(1, len(batches)))]
    needed = {key: key in keys for key in (read_plan(store, iteration).prompts_key, *numbered)}
    has_journal = any(key.startswith(layout.journal(iteration)) for key in keys)
    needed[layout.responses(iteration)] = has_journal or layout.responses(iteration) in keys
    lost = _lost_scores(store, iteration, keys)
    for key, is_there in (needed | dict.fromkeys(lost, False)).items():
        if not is_there:
            reason = f"it is missing, and iteration {iteration} must be replayed, because no newer checkpoint is stored"
            raise CorruptObject(key, reason)


def _lost_scores(store: ObjectStore, iteration: int, keys: Collection[str]) -> list[str]:
    """The missing scores of a pool's scorers, who have left; without a pool a replay asks the teacher again.

    keys: of the objects of the iteration.
    """
    teacher = config_in_force(store, read_plan(store, iteration)).teacher
    if teacher is None or teacher.pool is None or any(key.startswith(layout.scoring(iteration)) for key in keys):
        return []
    lost = []
    for number in range(sum(key.startswith(layout.batches(iteration)) for key in keys)):
        key, batch = layout.teacher_scores(iteration, number), layout.batch(iteration, number)
        if key not in keys and batch in keys:
            responses = records.read(store, BatchRecord, batch).responses
            # Nothing is scored of a micro-batch that trains nothing.
            lost += [key] if any(each.finish_reason != "failed" for each in responses) else []
    return lost
