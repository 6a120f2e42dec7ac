"""Restoring: rebuilds the learner at a weight version from checkpoints and published weights."""

from pathlib import Path

import torch

from storage import layout
from storage.clock import Clock
from storage.store import ObjectStore
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import pull_version
from tasks.configuration.run_config import RunConfig
from tasks.learning import checkpoint
from tasks.learning.adapted_policy import AdaptedPolicy, Pretrained
from tasks.learning.checkpoint import Checkpoint
from tasks.learning.critic import Critic
from tasks.learning.learner import CriticLearner, Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy, Scores
from tasks.learning.ranks import Ranks
from tasks.learning.shared_reading import read_shared
from tasks.learning.trained_model import training_device
from tasks.sampling.engines.weight_tensors import as_torch

REFERENCE_VERSION = 0


def restore_learner(
    store: ObjectStore, version: int, config: RunConfig, model: Path, clock: Clock, ranks: Ranks | None = None
) -> Learner:
    """Restore policy and optimizer at `version`, and the reference and the critic if the algorithm needs them.

    Every rank gets its part; all ranks must call it.
    """
    ranks = ranks or Ranks(device=training_device(config.trainer.device))
    saved = checkpoint.read(store, layout.checkpoint(version), ranks) if version else None
    policy = _policy(store, saved, config, model, clock, ranks)
    optimizer = PolicyOptimizer(policy.parameters(), config.optimizer)
    if saved:
        checkpoint.restore(saved, policy, optimizer)
    del saved  # This frees host memory for the critic's checkpoint, which is as large.
    critic = None
    if config.algorithm.estimator.needs_critic:
        critic = _critic(store, version, config, model, clock, ranks)
    return Learner(policy, optimizer, _reference(store, policy, config, model, clock, ranks), critic, ranks)


def _policy(
    store: ObjectStore, saved: Checkpoint | None, config: RunConfig, model: Path, clock: Clock, ranks: Ranks
) -> Policy:
    if config.lora is not None:
        pretrained = _pull_tensors(store, REFERENCE_VERSION, clock, ranks)
        return AdaptedPolicy(model, pretrained, config.trainer, config.lora, seed=config.run.seed, ranks=ranks)
    # Without a checkpoint, the policy begins with the run's first weights.
    tensors = saved.parameters if saved else _pull_tensors(store, REFERENCE_VERSION, clock, ranks)
    return Policy(model, tensors, config.trainer, ranks=ranks)


def _reference(
    store: ObjectStore, policy: Policy, config: RunConfig, model: Path, clock: Clock, ranks: Ranks
) -> Scores | None:
    if config.algorithm.kl_coef == 0:
        return None
    if isinstance(policy, AdaptedPolicy):
        return Pretrained(policy)
    return Policy(
        model, _pull_tensors(store, REFERENCE_VERSION, clock, ranks), config.trainer, trainable=False, ranks=ranks
    )


def _critic(
    store: ObjectStore, version: int, config: RunConfig, model: Path, clock: Clock, ranks: Ranks
) -> CriticLearner:
    saved = checkpoint.read(store, layout.critic_checkpoint(version), ranks) if version else None
    if saved:
        critic = Critic(model, saved.parameters, config.trainer, ranks=ranks)
    else:
        critic = Critic.of_policy(
            model, _pull_tensors(store, REFERENCE_VERSION, clock, ranks), config.trainer, ranks=ranks
        )
    optimizer = PolicyOptimizer(critic.parameters(), config.critic.optimizer)
    if saved:
        checkpoint.restore(saved, critic, optimizer)
    return CriticLearner(critic, optimizer, config.critic.warmup_iterations)


def _pull_tensors(store: ObjectStore, version: int, clock: Clock, ranks: Ranks) -> dict[str, torch.Tensor]:
    with ranks.failing_together():
        entries = read_manifest(store, layout.weights(version)).tensors
    blocks = read_shared(ranks, entries, lambda names: pull_version(store, version, None, clock, names=names)[1])
    return {name: as_torch(block) for name, block in blocks.items()}
