"""Publication: makes the result of a step durable, first the weights, then the checkpoint if one is due.

Rollouts wait for the weights; only a trainer that has lost the state waits for the checkpoint. Published weights
promise a way to the state behind the weights: a checkpoint or a replay. Every rank takes part.
"""

import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import torch

from storage.clock import Clock
from storage.records import layout
from storage.stores.store import ConflictingRecord, ObjectStore
from storage.weights.adapters import AdapterRecord, publish_adapter
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.tensor_sets import PUBLISHED_AT_S, read_manifest
from storage.weights.versions import WEIGHTS_FULL_INTERVAL, publish_version
from tasks.learning import checkpoint
from tasks.learning.adapted_policy import AdaptedPolicy
from tasks.learning.checkpoint import TrainerState
from tasks.learning.learner import Learner
from tasks.learning.policy import Policy
from tasks.learning.ranks import Ranks
from tasks.sampling.engines.weight_tensors import DTYPES, as_block

log = logging.getLogger(__name__)
Blocks = dict[str, TensorBlock]
SOURCE = {"source": "train"}


class AnotherWasFirstError(Exception):
    """Another trainer has stored a state whose last bits differ, as on GPUs; the run continues from its state."""


def publish_and_save(
    store: ObjectStore,
    version: int,
    learner: Learner,
    base: Mapping[str, TensorBlock],
    clock: Clock,
    *,
    saves: bool,
) -> None:
    """Publish the weights of a version, and with `saves` write its checkpoints; no partial object is ever visible.

    `base` is the content of version - 1, needed on the first rank unless adapters are published alone. A normal return
    means that the run goes on from the learner's state, or has a later state already. Raises AnotherWasFirstError on
    every rank if another trainer's state is stored; weights and checkpoints are durable then, too.
    """
    # What is drawn after this belongs to the next step.
    state = TrainerState.capture(version, learner.optimizer)
    conflict = _publish_together(store, version, learner, base, clock)
    if saves:
        # With its checkpoint a trainer that was second with the weights decides from which state the run goes on.
        conflict = save(store, version, learner, state, clock)
    if conflict is not None:
        raise AnotherWasFirstError(conflict)


def save(store: ObjectStore, version: int, learner: Learner, state: TrainerState, clock: Clock) -> str | None:
    """Write the checkpoints of a version; return on every rank the difference to a stored checkpoint of the policy.

    None means that the stored checkpoint of the policy is the learner's. The critic's checkpoint is written first,
    because the version counts as saved with the policy's. The stored critic may be another trainer's although the
    policy is this learner's, because both trainers learned from equal records.
    """
    began_s = clock.monotonic()
    if learner.critic is not None:
        model, optimizer = learner.critic.critic, learner.critic.optimizer
        prefix, own = layout.critic_checkpoint(version), TrainerState.capture(version, optimizer)
        with suppress(ConflictingRecord):
            checkpoint.save(store, prefix, model, optimizer, own, learner.ranks, clock=clock)
    try:
        prefix = layout.checkpoint(version)
        checkpoint.save(
            store, prefix, learner.policy, learner.optimizer, state, learner.ranks, clock=clock, began_s=began_s
        )
    except ConflictingRecord as error:
        return str(error)
    return None


def _publish_together(
    store: ObjectStore,
    version: int,
    learner: Learner,
    base: Mapping[str, TensorBlock],
    clock: Clock,
) -> str | None:
    """Publish the weights of a version; return on every rank the difference to stored weights, or None."""
    ranks, conflict = learner.ranks, None
    blocks = published_blocks(store, learner.policy, ranks)
    if ranks.is_first:
        try:
            _publish(store, version, learner.policy, blocks, base, clock)
        except ConflictingRecord as error:
            conflict = str(error)
            log.info("another trainer has published weight version %d first", version)
        else:
            log.info("published weight version %d", version)
    found: str | None = ranks.broadcast(conflict)
    return found


def _publish(
    store: ObjectStore,
    version: int,
    policy: Policy,
    blocks: Blocks,
    base: Mapping[str, TensorBlock],
    clock: Clock,
) -> Manifest:
    """Publish the result of `published_blocks`, as an adapter or as differences to `base`."""

    def published_at() -> Mapping[str, float]:
        return {PUBLISHED_AT_S: clock.wall()}

    adapter = published_adapter(policy)
    if adapter is not None:
        return publish_adapter(store, version, blocks, adapter, SOURCE, before_manifest=published_at)
    return publish_version(
        store, version, blocks, SOURCE, base=base, full_interval=WEIGHTS_FULL_INTERVAL, before_manifest=published_at
    )


def published_adapter(policy: Policy) -> AdapterRecord | None:
    """The adapter record of the policy's weight versions; None for versions with the model's tensors."""
    return policy.adapter if isinstance(policy, AdaptedPolicy) else None


def published_blocks(store: ObjectStore, policy: Policy, ranks: Ranks, *, lasting: bool = False) -> Blocks:
    """The policy's tensors for publication, with the names, shapes and dtypes of the run's first weights.

    If adapters are published alone, their factors in float32.

    Every rank must call `published_blocks`; only the first rank gets the tensors. `lasting`: the next optimizer step
    does not change the result. A lasting result costs the host the bytes of a weight version: 2 per parameter in
    bfloat16, beside 16 for parameters, gradients and moments.
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
