"""Configuration of the critic: its optimizer, and how long it learns alone. Read with advantage_estimator "gae"."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from tasks.learning.config import STRICT, OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """As the policy's, ten times as fast: what the critic learns is no policy that could be spoilt."""

    __pydantic_config__ = STRICT
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-5


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of PPO: the run's pretrained model with a value in the place of logits.

    Attributes:
        optimizer: Its own; see `tasks.learning.config.OptimizerConfig`.
        warmup_iterations: The first iterations of the run, in which only the critic is trained.
    """

    __pydantic_config__ = STRICT
    optimizer: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    warmup_iterations: Annotated[int, Field(ge=0)] = 0
