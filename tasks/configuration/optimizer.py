"""The section `optimizer`: the optimizer of the policy, and its learning rate over time."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tasks.configuration.older_form import BETAS

STRICT = ConfigDict(extra="forbid", strict=True)

OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
ADAMW: OptimizerName = "adamw"
# Younger than runs that go on; see tasks.configuration.operational.
YOUNG: dict[str, object] = {"name": ADAMW}
_Decay = Annotated[float, Field(ge=0, lt=1)]
LearningRateSchedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its learning-rate schedule and gradient clipping.

    Attributes:
        name: "adamw"; "adamw_8bit" keeps its moments in 8 bits (torchao); "muon" updates the matrices between embedding
            and head by Muon with one momentum, of 0.95, and the rest by AdamW.
        learning_rate: The peak, reached after the warm-up.
        betas: AdamW's decays of the running means of the gradient and of its square.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay; applied to matrices only, never to norms and biases.
        max_grad_norm: The gradient's 2-norm is clipped to this; infinity never clips.
        warmup_steps: The number of steps of linear increase from learning_rate / warmup_steps.
        schedule: The schedule after the warm-up.
        total_steps: The number of optimizer steps until the rate is 0; needed by "linear" and "cosine".
    """

    __pydantic_config__ = STRICT
    name: OptimizerName = ADAMW
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    betas: tuple[_Decay, _Decay] = BETAS
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: LearningRateSchedule = "constant"
    total_steps: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        if self.schedule == "constant":
            return
        if self.total_steps is None:
            raise ValueError(f"total_steps: value null; allowed: an integer >= 1 with schedule {self.schedule!r}")
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps: value {self.warmup_steps}; allowed: less than total_steps ({self.total_steps})"
            )
