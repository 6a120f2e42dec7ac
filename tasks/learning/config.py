"""Configuration of learning: the algorithm, the optimizer, and how the train task runs.

Owns names, ranges and defaults; knows no tensors. Every value is checked here, before anything is created.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True)

AdvantageEstimator = Literal["grpo"]
RewardScale = Literal["group", "none"]
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3"]
LearningRateSchedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Which policy-gradient estimator is used.

    Attributes:
        advantage_estimator: "grpo": reward minus the mean reward of the group (arXiv 2402.03300).
        scale_rewards: "group" divides by the group's standard deviation, "none" does not (Dr.GRPO, arXiv 2503.20783).
        advantage_eps: Added to the standard deviation.
        clip_ratio_low: The probability ratio is clipped below at 1 - clip_ratio_low.
        clip_ratio_high: The probability ratio is clipped above at 1 + clip_ratio_high.
        loss_agg_mode: How token losses become one number; see `tasks.learning.loss.token_weights`.
        kl_coef: Weight of the KL to the reference policy in the loss; 0 needs no reference policy.
        kl_estimator: See `tasks.learning.loss.kl_penalty`.
        old_logprobs: Denominator of the ratio: "trainer" recomputes it (ratio 1 in the single step of an iteration),
            "sampler" takes what the engine recorded.
        micro_batch_order: "plan" trains groups in the order of the plan (bit-reproducible), "arrival" as they finish.
    """

    __pydantic_config__ = STRICT
    advantage_estimator: AdvantageEstimator = "grpo"
    scale_rewards: RewardScale = "group"
    advantage_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    clip_ratio_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_ratio_high: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.28
    loss_agg_mode: LossAggregation = "token-mean"
    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    kl_estimator: KlEstimator = "k3"
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    micro_batch_order: Literal["plan", "arrival"] = "plan"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning-rate schedule and gradient clipping.

    Attributes:
        learning_rate: The peak, reached after the warm-up.
        beta1: Decay of the mean of the gradient.
        beta2: Decay of the mean of its square.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled; applied to matrices only, never to norms and biases.
        max_grad_norm: The gradient's 2-norm is clipped to it; infinity never clips.
        warmup_steps: Steps of linear increase from learning_rate / warmup_steps.
        schedule: What follows the warm-up.
        total_steps: Optimizer steps until the minimum is reached; needed by "linear" and "cosine".
        min_learning_rate_ratio: The minimum as a fraction of learning_rate.
    """

    __pydantic_config__ = STRICT
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: LearningRateSchedule = "constant"
    total_steps: Annotated[int, Field(ge=1)] | None = None
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0

    def __post_init__(self) -> None:
        if self.schedule == "constant":
            return
        if self.total_steps is None:
            raise ValueError(f"total_steps: value null; allowed: an integer >= 1 with schedule {self.schedule!r}")
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps: value {self.warmup_steps}; allowed: less than total_steps ({self.total_steps})"
            )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How the train task runs.

    Attributes:
        dtype: Of the matrix products; parameters, gradients and moments are float32 either way.
        device: "auto" takes the first GPU where there is one.
        micro_batch_tokens_max: Padded tokens (prompt and response) in one forward pass. Groups are never divided: one
            that is larger is a micro-batch of its own.
        gradient_checkpointing: Recompute the layers' activations in the backward pass.
        group_timeout_s: How long to wait for a group that makes no progress before giving up.
        poll_interval_s: Pause between two looks at the journal.
        weights_full_interval: Every so many versions the weights are published whole, and earlier when the differences
            since then exceed a version's bytes; else as differences.
    """

    __pydantic_config__ = STRICT
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    micro_batch_tokens_max: Annotated[int, Field(ge=1)] = 16384
    gradient_checkpointing: bool = False
    group_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    poll_interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    weights_full_interval: Annotated[int, Field(ge=1)] = 10
