"""The settings of a run's engines with every "auto" that the rest of the configuration decides."""

from dataclasses import replace

from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.run_config import RunConfig


def engine_settings(config: RunConfig) -> RolloutConfig:
    """The section `rollout` for an engine: `vllm.batch_invariant` is true or false.

    "auto" is false where the loss corrects for the sampler anyway, because batch-invariant kernels cost speed, and true
    where nothing corrects. A user who wants resumed responses to be identical says true.
    """
    rollout = config.rollout
    if rollout.vllm.batch_invariant != "auto":
        return rollout
    return replace(rollout, vllm=replace(rollout.vllm, batch_invariant=not config.algorithm.corrects_for_sampler))
