"""Publication: what a step made, durable: the checkpoint first, then the weights that promise it is there.

Objects of both are written side by side; only the order of their manifests matters. Every rank takes part.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import torch

from storage import layout
from storage.clock import Clock
from storage.store import ConflictingRecord, ObjectStore
from storage.weights.manifest import TensorBlock
from storage.weights.tensor_sets import PUBLISHED_AT_S, read_manifest
from storage.weights.versions import publish_version
from tasks.learning import checkpoint
from tasks.learning.checkpoint import Saving, TrainerState
from tasks.learning.learner import Learner
from tasks.learning.policy import Policy
from tasks.learning.ranks import Ranks
from tasks.sampling.engines.weight_tensors import DTYPES, as_block

Blocks = dict[str, TensorBlock]
SOURCE = {"source": "train"}


class AnotherWasFirstError(Exception):
    """Another trainer has stored a checkpoint whose last bits differ, as they do on a GPU; the run goes on from it."""


def save_and_publish(
    store: ObjectStore,
    version: int,
    learner: Learner,
    base: Mapping[str, TensorBlock],
    full_interval: int,
    clock: Clock,
) -> None:
    """Write the checkpoints of a version and publish its weights, which exist only when the checkpoints do.

    `base` is what version - 1 holds, needed on the first rank. The critic's checkpoint comes first, and may be another
    trainer's even when the policy's is ours: both learned from the same. Raises AnotherWasFirstError on every rank;
    nothing is published then.
    """
    critic: Saving | None = None
    if learner.critic is not None:
        model, optimizer = learner.critic.critic, learner.critic.optimizer
        state = TrainerState.capture(version, optimizer)
        critic = checkpoint.begin(store, layout.critic_checkpoint(version), model, optimizer, state, learner.ranks)
    state = TrainerState.capture(version, learner.optimizer)
    prefix = layout.checkpoint(version)
    policy = checkpoint.begin(store, prefix, learner.policy, learner.optimizer, state, learner.ranks)

    def finish() -> dict[str, float]:
        # Others wait here for the first, which writes the weights' objects meanwhile, and not in a collective.
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
    publish_version(store, version, blocks, SOURCE, base=base, full_interval=full_interval, before_manifest=finish)


def publish(
    store: ObjectStore,
    version: int,
    learner: Learner,
    base: Mapping[str, TensorBlock],
    full_interval: int,
    clock: Clock,
) -> None:
    """Publish the weights of a version whose checkpoint is stored."""
    blocks = published_blocks(store, learner.policy, learner.ranks)
    if learner.ranks.is_first:
        metadata = {**SOURCE, PUBLISHED_AT_S: clock.wall()}
        publish_version(store, version, blocks, metadata, base=base, full_interval=full_interval)


def published_blocks(store: ObjectStore, policy: Policy, ranks: Ranks, *, lasting: bool = False) -> Blocks:
    """The policy as it is published, each tensor in the dtype in which the run's first weights give it.

    Every rank must call it; only the first gets, and holds, them. `lasting`: they must not change with the next step.
    That costs the trainer's host the bytes of one weight version, 2 per parameter in bfloat16 beside the 16 of
    parameters, gradients and moments.
    """
    given = {name: DTYPES[entry.dtype] for name, entry in read_manifest(store, layout.weights(0)).tensors.items()}
    # Tied tensors are one object under several names, any of which may be the one in the first weights.
    dtypes = {policy.canonical(name): dtype for name, dtype in given.items()} | given
    usual, _ = Counter(dtype for dtype in given.values() if dtype.is_floating_point).most_common(1)[0]
    blocks: Blocks = {}
    for name, tensor in policy.each_tensor(usual, dtypes):
        if ranks.is_first:
            # Float32 tensors of a policy on the CPU are the parameters themselves.
            blocks[name] = as_block(tensor.clone() if lasting and tensor.dtype == torch.float32 else tensor)
    return blocks
