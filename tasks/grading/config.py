"""What the user says about rewards: which functions, their weights and time limits, and what a failure counts.

Imports no reward function: that happens in the process that runs it.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

BUILT_IN = ("arithmetic", "math")
_USER_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One reward function of a run.

    `function` is "arithmetic", "math", or "package.module:function" with TRL's or verl's signature. `time_limit_s`
    bounds one call: a whole batch for TRL's signature, one response otherwise; `load_time_limit_s` bounds the import.
    A response whose reward raised or ran out of time counts as `failure_reward`, or ends grading with an error.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    function: str
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    load_time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    failure_reward: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    on_failure: Literal["use_failure_reward", "stop"] = "use_failure_reward"

    def __post_init__(self) -> None:
        if self.function not in BUILT_IN and not _USER_FUNCTION.fullmatch(self.function):
            raise ValueError(
                f"function: value {self.function!r}; allowed: {', '.join(map(repr, BUILT_IN))}, "
                f"or 'package.module:function'"
            )
