"""Faster passes: which of Liger's kernels, packing and compiled layers the models of a learner have.

Each is tried on the policy when it is restored, forward and backward, and kept if the policy computes the same. It
depends on the configuration, the device, the packages and the model, so every attempt on such a machine decides alike.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import TokenBatch
from tasks.learning.compiled_layers import compile_if_equal, compile_layers
from tasks.learning.equal_passes import Pass
from tasks.learning.learner import Learner
from tasks.learning.liger import LigerPatch, liger_if_equal, patch_of
from tasks.learning.packing import pack, pack_if_equal
from tasks.learning.policy import Policy, probe
from tasks.learning.ranks import Ranks
from tasks.learning.trained_model import PolicyError, compute_dtype


def make_faster(learner: Learner, config: TrainerConfig) -> None:
    """Let the passes of a learner's models have what configuration and device allow; every rank must call it.

    Raises PolicyError if the configuration demands Liger's kernels and they cannot be had.
    """
    # float32 stays as exact as it is, and torch has no kernel for it, or for a CPU, that attends within the responses
    # of a row.
    suits = compute_dtype(config) is not None and learner.policy.device.type == "cuda"
    if config.use_liger_kernel is True or (config.use_liger_kernel == "auto" and suits):
        _use_liger(learner, is_demanded=config.use_liger_kernel is True)
    if suits:
        pack_models(learner)
    if config.compile_layers:
        _compile(learner)


def pack_models(learner: Learner) -> None:
    """Let passes have no padding, unless the policy then computes something else on one of the ranks."""
    if pack_if_equal(learner.policy.module, *_trial(learner)):
        for model in _others(learner):
            pack(model)


def _use_liger(learner: Learner, *, is_demanded: bool) -> None:
    policy = learner.policy
    reason = liger_if_equal(policy.module, policy.device, *_trial(learner))
    if reason is not None and is_demanded:
        raise PolicyError(f"trainer.use_liger_kernel: value true; allowed here: 'auto' or false: {reason}")
    if reason is None and isinstance(learner.reference, Policy):
        reference = learner.reference.module
        LigerPatch(reference).apply(patch_of(reference, policy.device))


def _compile(learner: Learner) -> None:
    if compile_if_equal(learner.policy.module, *_trial(learner)):
        for model in _others(learner):
            compile_layers(model)


def _trial(learner: Learner) -> tuple[Pass, TokenBatch, Ranks]:
    """What a change is tried with: a pass of the policy, the probe, and the ranks that decide."""
    return partial(_probed, learner.policy), probe(learner.policy, (1, 3, 2)), learner.ranks


def _others(learner: Learner) -> Iterator[Any]:
    """The Hugging Face models beside the policy's: the reference's and the critic's."""
    if isinstance(learner.reference, Policy):
        yield learner.reference.module
    if learner.critic is not None:
        yield learner.critic.critic.module.model


def _probed(policy: Policy, batch: TokenBatch) -> Tensor:
    """Log-probs of a pass, after one backward pass, whose gradient is dropped."""
    try:
        logprobs, _, objective = policy.objective(batch, 1.0, lambda each, _: each)
        objective.backward()  # type: ignore[no-untyped-call]
    except Exception:
        policy.break_off()
        raise
    policy.drop_gradient()
    return logprobs
