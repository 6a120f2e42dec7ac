"""Publication: makes the result of a step durable, first the weights, then the checkpoint if one is due.

Rollouts wait for the weights, and nothing waits for the checkpoint but a trainer that has lost the state. Published
weights promise that their checkpoint, or else a replay, leads to their state. Every rank takes part.
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
from storage.weights.versions import publish_version
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
# Of ten versions one is stored whole: a new machine reads at most nine differences, of 1 to 3 % of a version each in
# bfloat16 at a learning rate of 1e-6.
WEIGHTS_FULL_INTERVAL = 10


class AnotherWasFirstError(Exception):
    """Another trainer has stored a state whose last bits differ, as on GPUs; the run continues from that one."""


def publish_and_save(
    store: ObjectStore,
    version: int,
    learner: Learner,
    base: Mapping[str, TensorBlock],
    clock: Clock,
    *,
    saves: bool,
) -> None:
    """Publish the weights of a version, then write its checkpoints if it `saves`; each exists when it is whole.

    `base` is the content of version - 1, needed on the first rank unless adapters are published alone. Returns if the
    learner has the state from which the run goes on, or a later one is trained. Raises AnotherWasFirstError on every
    rank if another trainer's is stored; everything is durable then, too.
    """
    # What is drawn after this belongs to the next step.
    state = TrainerState.capture(version, learner.optimizer)
    conflict = _publish_together(store, version, learner, base, WEIGHTS_FULL_INTERVAL, clock)
    if saves:
        # With its checkpoint a trainer that was second with the weights decides from which state the run goes on.
        conflict = save(store, version, learner, state, clock)
    if conflict is not None:
        raise AnotherWasFirstError(conflict)


def save(store: ObjectStore, version: int, learner: Learner, state: TrainerState, clock: Clock) -> str | None:
    """Write the checkpoints of a version; returns on every rank in which tensor a stored one differs.

    None: the policy's is the learner's. The critic's comes first, because with the policy's the version has a
    checkpoint. It may be another trainer's although the policy's is ours, because both learned from the same records.
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
    full_interval: int,
    clock: Clock,
) -> str | None:
    """Publish the weights of a version; returns on every rank in which tensor stored ones differ."""
    ranks, conflict = learner.ranks, None
    blocks = published_blocks(store, learner.policy, ranks)
    if ranks.is_first:
        try:
            _publish(store, version, learner.policy, blocks, base, full_interval, clock)
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
    full_interval: int,
    clock: Clock,
) -> Manifest:
    """Publish what `published_blocks` returned, as an adapter or as differences to `base`."""

    def published_at() -> Mapping[str, float]:
        return {PUBLISHED_AT_S: clock.wall()}

    adapter = published_adapter(policy)
    if adapter is not None:
        return publish_adapter(store, version, blocks, adapter, SOURCE, before_manifest=published_at)
    return publish_version(
        store, version, blocks, SOURCE, base=base, full_interval=full_interval, before_manifest=published_at
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
