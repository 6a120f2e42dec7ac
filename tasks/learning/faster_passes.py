"""Faster passes: which of Liger's kernels, packing and compiled layers the models of a learner have.

Each change is tried on the restored policy, forward and backward, and kept if the policy's log-probs stay equal. The
outcome depends on configuration, device, packages and model only, so every attempt on an equal machine decides alike.
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
    """Speed up the passes of a learner's models as configuration and device allow; every rank must call `make_faster`.

    Raises PolicyError if the configuration demands Liger's kernels and the model or the machine cannot use the kernels.
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
    """Pack the passes of all models, unless the policy's log-probs then move on any rank."""
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
    """The arguments of a trial: a pass of the policy, the probe, and the ranks that decide."""
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
