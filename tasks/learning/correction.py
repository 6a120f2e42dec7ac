"""Correction: whether, and by which kind of importance weights, a run's loss corrects for its sampler.

The answer follows from the configuration and from the dtypes of the first weights alone, so that every attempt decides
alike. `tasks.learning.importance` computes the weights.
"""

from collections.abc import Collection
from typing import Literal

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.rollout import OUR_ENGINES, RolloutConfig
from tasks.configuration.trainer import TrainerConfig

ImportanceMode = Literal["token", "sequence-mask"]


def same_engine(rollout: RolloutConfig, trainer: TrainerConfig, published_dtypes: Collection[str]) -> bool:
    """Whether the engine is known to compute log-probs as the trainer does: it is our own, and everything is float32.

    In bfloat16, batch mates change the last bits, and published bfloat16 weights are not the trainer's. The answer
    depends only on values that never change in a run, not on what a member reports, so that every attempt decides
    alike.

    Args:
        rollout: The engine and its dtype are used.
        trainer: Its dtype is used.
        published_dtypes: The dtypes of the run's first weights, as manifests name them ("F32").
    """
    is_exact = {rollout.dtype, trainer.dtype} == {"float32"} and set(published_dtypes) <= {"F32"}
    return rollout.engine in OUR_ENGINES and is_exact


def importance_mode(algorithm: AlgorithmConfig, *, same_engine: bool) -> ImportanceMode | None:
    """The kind of importance weights, or None for none; "auto" is "token" unless engine and weights are the trainer's.

    None with old_logprobs "sampler", because the ratio of the loss corrects already, and for examples.
    """
    if algorithm.learns_examples or algorithm.old_logprobs == "sampler" or algorithm.importance_sampling == "none":
        return None
    if algorithm.importance_sampling != "auto":
        return algorithm.importance_sampling
    return None if same_engine and algorithm.max_staleness == 0 else "token"
