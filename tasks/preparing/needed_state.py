"""What training an iteration will read: it is looked at before the iteration's rollout is paid for."""

from storage import layout
from storage.run import ConcludedByAnother, exists, next_iteration, release_lease
from storage.store import CorruptObject, ObjectMissing, ObjectStore
from storage.weights.inspection import inspect_set
from tasks.configuration.run_config import RunConfig


def check_needed_state(store: ObjectStore, config: RunConfig, iteration: int, execution: str) -> None:
    """Look at the checkpoints and the pretrained weights that training `iteration` restores from.

    Does nothing for the first iteration, whose weights each member verifies, or if the iteration is trained already.
    Raises ObjectMissing or CorruptObject, which names what is damaged, with the lease of `execution` released; or
    ConcludedByAnother, if they are gone because the iteration was concluded meanwhile.
    """
    if iteration == 0 or exists(store, layout.manifest(layout.checkpoint(iteration + 1))):
        return
    try:
        inspect_set(store, layout.checkpoint(iteration))
        if config.algorithm.estimator.needs_critic:
            inspect_set(store, layout.critic_checkpoint(iteration))
        if config.lora is not None or config.algorithm.kl_coef:
            inspect_set(store, layout.weights(0))
    except (CorruptObject, ObjectMissing) as error:
        if next_iteration(store) != iteration:
            raise ConcludedByAnother(iteration, "planned it") from error
        release_lease(store, execution)
        raise
