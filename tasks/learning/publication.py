"""Publication: makes the result of a step durable, first the checkpoint if one is due, then the weights.

Published weights promise that their checkpoint exists if one is due, or else that a replay leads to their state. The
objects of both are written side by side; only the order of their manifests matters. Every rank takes part.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from storage import layout
from storage.clock import Clock
from storage.records import PlanRecord
from storage.run import exists, read_settings
from storage.store import ConflictingRecord, ObjectStore
from storage.weights.adapters import AdapterRecord, publish_adapter
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.tensor_sets import PUBLISHED_AT_S, read_manifest
from storage.weights.versions import publish_version
from tasks.configuration.trainer import TrainerConfig
from tasks.learning import checkpoint
from tasks.learning.adapted_policy import AdaptedPolicy
from tasks.learning.checkpoint import Saving, TrainerState
from tasks.learning.learner import Learner
from tasks.learning.policy import Policy
from tasks.learning.ranks import Ranks
from tasks.sampling.engines.weight_tensors import DTYPES, as_block

Blocks = dict[str, TensorBlock]
SOURCE = {"source": "train"}


class AnotherWasFirstError(Exception):
    """Another trainer has stored a state whose last bits differ, as on GPUs; the run continues from that one."""


def is_checkpoint_due(store: ObjectStore, plan: PlanRecord, trainer: TrainerConfig) -> bool:
    """Whether the trainer of an iteration is to store its state: at each interval, and at the end of an execution."""
    version = plan.iteration + 1
    settings = read_settings(store, plan.iteration)
    return version % trainer.checkpoint_interval == 0 or (settings is not None and settings.ends_execution)


def save_and_publish(
    store: ObjectStore,
    version: int,
    learner: Learner,
    base: Mapping[str, TensorBlock],
    trainer: TrainerConfig,
    clock: Clock,
    *,
    saves: bool,
) -> None:
    """Write the checkpoints of a version if it `saves`, and publish its weights, which exist only when those do.

    `base` is the content of version - 1, needed on the first rank unless adapters are published alone. The critic's
    checkpoint comes first. It may be another trainer's although the policy's is ours, because both trainers learned
    from the same records. Raises AnotherWasFirstError on every rank; then nothing is published, or without checkpoints
    the other trainer's weights.
    """
    if not saves:
        _publish_alone(store, version, learner, base, trainer.weights_full_interval, clock)
        return
    critic: Saving | None = None
    if learner.critic is not None:
        model, optimizer = learner.critic.critic, learner.critic.optimizer
        state = TrainerState.capture(version, optimizer)
        critic = checkpoint.begin(store, layout.critic_checkpoint(version), model, optimizer, state, learner.ranks)
    state = TrainerState.capture(version, learner.optimizer)
    prefix = layout.checkpoint(version)
    policy = checkpoint.begin(store, prefix, learner.policy, learner.optimizer, state, learner.ranks)

    def finish() -> dict[str, float]:
        # The other ranks wait here, not in a collective, while the first writes the objects of the weights.
        learner.ranks.broadcast()
        if critic is not None:
            with suppress(ConflictingRecord):
                critic.finish()
        try:
            policy.finish()
        except ConflictingRecord as error:
            raise AnotherWasFirstError(str(error)) from error
        return {PUBLISHED_AT_S: clock.wall()}

    blocks = published_blocks(store, learner.policy, learner.ranks)
    if not learner.ranks.is_first:
        finish()
        return
    interval = trainer.weights_full_interval
    _publish(store, version, learner.policy, blocks, base, interval, SOURCE, finish)


def _publish_alone(
    store: ObjectStore,
    version: int,
    learner: Learner,
    base: Mapping[str, TensorBlock],
    full_interval: int,
    clock: Clock,
) -> None:
    """Publish the weights of a version without a checkpoint; raises AnotherWasFirstError on every rank."""
    ranks, conflict = learner.ranks, None
    blocks = published_blocks(store, learner.policy, ranks)
    if ranks.is_first:
        try:
            _publish(
                store,
                version,
                learner.policy,
                blocks,
                base,
                full_interval,
                SOURCE,
                lambda: {PUBLISHED_AT_S: clock.wall()},
            )
        except ConflictingRecord as error:
            conflict = str(error)
    if conflict := ranks.broadcast(conflict):
        raise AnotherWasFirstError(conflict)


def publish(
    store: ObjectStore,
    version: int,
    learner: Learner,
    base: Mapping[str, TensorBlock],
    full_interval: int,
    clock: Clock,
) -> None:
    """Publish the weights of a version whose checkpoint is stored."""
    assert exists(store, layout.manifest(layout.checkpoint(version))), f"version {version} has no checkpoint"
    blocks = published_blocks(store, learner.policy, learner.ranks)
    if learner.ranks.is_first:
        metadata = {**SOURCE, PUBLISHED_AT_S: clock.wall()}
        _publish(store, version, learner.policy, blocks, base, full_interval, metadata)


def _publish(
    store: ObjectStore,
    version: int,
    policy: Policy,
    blocks: Blocks,
    base: Mapping[str, TensorBlock],
    full_interval: int,
    metadata: Mapping[str, Any],
    before_manifest: Callable[[], Mapping[str, Any]] = dict,
) -> Manifest:
    """Publish what `published_blocks` returned, as an adapter or as differences to `base`."""
    adapter = published_adapter(policy)
    if adapter is not None:
        return publish_adapter(store, version, blocks, adapter, metadata, before_manifest=before_manifest)
    return publish_version(
        store, version, blocks, metadata, base=base, full_interval=full_interval, before_manifest=before_manifest
    )


def published_adapter(policy: Policy) -> AdapterRecord | None:
    """What the policy's weight versions say of their adapter; None if they hold the model's tensors."""
    return policy.adapter if isinstance(policy, AdaptedPolicy) else None


def published_blocks(store: ObjectStore, policy: Policy, ranks: Ranks, *, lasting: bool = False) -> Blocks:
    """The policy's tensors for publication, with the names, shapes and dtypes of the run's first weights.

    If adapters are published alone, their factors in float32.

    Every rank must call it; only the first gets the tensors. `lasting`: they do not change with the next optimizer
    step, which costs the host the bytes of one weight version: 2 per parameter in bfloat16, beside the 16 for
    parameters, gradients and moments.
    """
    if isinstance(policy, AdaptedPolicy) and policy.adapter is not None:
        factors = policy.each_factor()
        return {name: as_block(tensor.clone() if lasting else tensor) for name, tensor in factors if ranks.is_first}
    entries = read_manifest(store, layout.weights(0)).tensors
    first = {name: torch.empty(each.shape, dtype=DTYPES[each.dtype], device="meta") for name, each in entries.items()}
    names = policy.stored_names(first)
    blocks: Blocks = {}
    own = policy.each_tensor(dtypes=names.dtypes)
    if not ranks.is_first:
        deque(own, maxlen=0)
        return blocks
    for name, tensor in names.to_stored(own):
        # For a policy on the CPU, float32 tensors are the parameters themselves.
        blocks[name] = as_block(tensor.clone() if lasting and tensor.dtype == torch.float32 else tensor)
    return blocks
