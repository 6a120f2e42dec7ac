"""Restoring: rebuilds the learner at a weight version from checkpoints and published weights.

A checkpoint's tensors are read in parallel, beside the building of the model, and go straight into its memory: the host
holds a window of tensors, never a copy of the whole, unless the state is read ahead.
"""

from pathlib import Path

import torch

from storage.clock import Clock
from storage.records import layout
from storage.stores.store import ObjectStore
from storage.weights.stored_versions import restored_checkpoint
from storage.weights.tensor_sets import TensorBlock, read_manifest
from storage.weights.versions import pull_version
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.run_config import RunConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning import checkpoint
from tasks.learning.adapted_policy import AdaptedPolicy, Pretrained
from tasks.learning.checkpoint import Checkpoint
from tasks.learning.critic import Critic
from tasks.learning.faster_passes import make_faster
from tasks.learning.learner import CriticLearner, Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy, Scores
from tasks.learning.ranks import Ranks
from tasks.learning.sharded import Stored
from tasks.learning.shared_reading import read_shared
from tasks.learning.teachers import Teachers
from tasks.learning.trained_model import PolicyError, TrainedModel, training_device
from tasks.sampling.engines.choose import context_length
from tasks.sampling.engines.steady_positions import unsteady

REFERENCE_VERSION = 0


class StoredState:
    """The stored state of a learner, as tensors in host memory: read on request, or ahead of the request.

    With several ranks, each rank has a StoredState with its own rows, and every rank must call equal methods. version:
    0, or a version that has a checkpoint, as `restored_from` says.
    """

    def __init__(self, store: ObjectStore, version: int, clock: Clock, ranks: Ranks | None = None) -> None:
        self.store = store
        self.version = version
        self._clock = clock
        self._ranks = ranks or Ranks()
        with self._ranks.failing_together():
            self._has_checkpoint = restored_checkpoint(store, version) is not None
        self._checkpoints: dict[str, Checkpoint] = {}
        self._pretrained: dict[str, Stored] | None = None

    def read_ahead(self, config: RunConfig) -> None:
        """Read every tensor needed by a learner of this configuration; afterwards `num_bytes` is the memory in use."""
        needs_critic = config.algorithm.estimator.needs_critic
        critic = [layout.critic_checkpoint(self.version)] if needs_critic else []
        for prefix in [layout.checkpoint(self.version), *critic] if self._has_checkpoint else []:
            self._checkpoints[prefix] = checkpoint.read(self.store, prefix, self._ranks)
        if not self._has_checkpoint or config.lora is not None or config.algorithm.needs_reference:
            self._pretrained = self._pull_pretrained()

    @property
    def num_bytes(self) -> int:
        """The bytes of tensors that were read ahead and are not taken yet."""
        kept = [(self._pretrained or {}).values()]
        for saved in self._checkpoints.values():
            kept += [saved.parameters.values(), *(tensors.values() for tensors in saved.moments.values())]
        return sum(tensor.nbytes for tensors in kept for tensor in tensors)

    def policy(self) -> Checkpoint | None:
        """The checkpoint of the policy; None before the first. To be called once."""
        return self._checkpoint(layout.checkpoint(self.version))

    def critic(self) -> Checkpoint | None:
        """The checkpoint of the critic; None before the first. To be called once."""
        return self._checkpoint(layout.critic_checkpoint(self.version))

    def pretrained(self) -> dict[str, Stored]:
        """The run's first weights."""
        return self._pull_pretrained() if self._pretrained is None else self._pretrained

    def release(self) -> None:
        """Drop tensors that were read ahead, because a learner has its own tensors."""
        self._checkpoints.clear()
        self._pretrained = None

    def _checkpoint(self, prefix: str) -> Checkpoint | None:
        if not self._has_checkpoint:
            return None
        # It is given away, so that its memory is free as soon as the learner has its own.
        return self._checkpoints.pop(prefix, None) or checkpoint.opened(self.store, prefix, self._ranks)

    def _pull_pretrained(self) -> dict[str, Stored]:
        ranks = self._ranks
        with ranks.failing_together():
            entries = read_manifest(self.store, layout.weights(REFERENCE_VERSION)).tensors

        def read(names: list[str]) -> dict[str, TensorBlock]:
            return pull_version(self.store, REFERENCE_VERSION, None, self._clock, names=names)[1]

        return read_shared(ranks, entries, read)


def restore_learner(
    store: ObjectStore, version: int, config: RunConfig, model: Path, clock: Clock, ranks: Ranks | None = None
) -> Learner:
    """Restore policy and optimizer at `version`, and the reference and the critic if the algorithm needs them.

    Every rank must call `restore_learner` and gets its part.
    """
    ranks = ranks or Ranks(device=training_device(config.trainer.device))
    return learner_of(StoredState(store, version, clock, ranks), config, model, ranks)


def learner_of(state: StoredState, config: RunConfig, model: Path, ranks: Ranks | None = None) -> Learner:
    """The learner of a stored state, on the device of `ranks`; every rank must call `learner_of`."""
    ranks = ranks or Ranks(device=training_device(config.trainer.device))
    saved = state.policy()
    generator = None if saved is None else saved.state.rng_tensor()
    policy = _policy(state, saved, config, model, ranks)
    reason = unsteady(policy.module, context_length(config.rollout, model))
    if reason is not None:
        raise PolicyError(reason)
    optimizer = optimizer_of(policy, config.optimizer, config.trainer)
    if saved:
        checkpoint.check_optimizer(saved, optimizer)
        if isinstance(policy, AdaptedPolicy):
            policy.load_trained(saved.parameters)
        optimizer.restore(saved.state.optimizer_steps, saved.moments)
    del saved  # This frees host memory for the critic's checkpoint, which is as large.
    critic = None
    if config.algorithm.estimator.needs_critic:
        critic = _critic(state, config, model, ranks)
    reference = _reference(state, policy, config, model, ranks)
    teachers = None if config.teacher is None else Teachers(state.store, config.trainer, ranks)
    learner = Learner(policy, optimizer, reference, critic, ranks, teachers)
    make_faster(learner, config.trainer)
    state.release()
    # Last, because building a model draws numbers. A replay builds none between two iterations.
    if generator is None:
        torch.manual_seed(config.run.seed)
    else:
        torch.set_rng_state(generator)
    return learner


def optimizer_of(model: TrainedModel, config: OptimizerConfig, trainer: TrainerConfig) -> PolicyOptimizer:
    """The optimizer of a model that is trained; raises as `PolicyOptimizer`."""
    return PolicyOptimizer(model.parameters(), config, outer=model.outer_parameters(), offload=trainer.offload)


def _policy(state: StoredState, saved: Checkpoint | None, config: RunConfig, model: Path, ranks: Ranks) -> Policy:
    if config.lora is not None:
        seed = config.run.seed
        return AdaptedPolicy(model, state.pretrained(), config.trainer, config.lora, seed=seed, ranks=ranks)
    # Without a checkpoint, the policy begins with the run's first weights.
    tensors = saved.parameters if saved else state.pretrained()
    return Policy(model, tensors, config.trainer, ranks=ranks)


def _reference(state: StoredState, policy: Policy, config: RunConfig, model: Path, ranks: Ranks) -> Scores | None:
    if not config.algorithm.needs_reference:
        return None
    if isinstance(policy, AdaptedPolicy):
        return Pretrained(policy)
    return Policy(model, state.pretrained(), config.trainer, trainable=False, ranks=ranks)


def _critic(state: StoredState, config: RunConfig, model: Path, ranks: Ranks) -> CriticLearner:
    saved = state.critic()
    if saved:
        critic = Critic(model, saved.parameters, config.trainer, ranks=ranks)
    else:
        critic = Critic.of_policy(model, state.pretrained(), config.trainer, ranks=ranks)
    optimizer = optimizer_of(critic, config.critic.optimizer, config.trainer)
    if saved:
        checkpoint.check_optimizer(saved, optimizer, "critic.optimizer")
        optimizer.restore(saved.state.optimizer_steps, saved.moments)
    return CriticLearner(critic, optimizer, config.critic.warmup_iterations)
