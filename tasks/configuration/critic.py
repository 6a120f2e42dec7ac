"""The section `critic`: the critic's optimizer and its warm-up. Estimators with a critic read the section."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field

from tasks.configuration.optimizer import OptimizerConfig

STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """The policy's settings with ten times the learning rate: a large step of the critic does not harm the policy."""

    __pydantic_config__ = STRICT
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-5


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of PPO: the run's pretrained model with a value in place of logits.

    Attributes:
        optimizer: The critic's own optimizer; see `tasks.configuration.optimizer.OptimizerConfig`.
        warmup_iterations: The first iterations of the run, in which only the critic is trained.
    """

    __pydantic_config__ = STRICT
    optimizer: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    warmup_iterations: Annotated[int, Field(ge=0)] = 0
