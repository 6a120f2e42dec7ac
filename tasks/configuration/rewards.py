"""The section `rewards`: the functions, their settings, weights and time limits, and the reward of a failure.

It imports no reward function; the process that runs a function does.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from tasks.configuration import user_function

BUILT_IN = ("arithmetic", "environment", "format", "length", "math", "reward_model")
# The settings that belong to one built-in function only, and those of them that it requires.
SETTINGS: dict[str, tuple[str, ...]] = {
    "format": ("pattern",),
    "length": ("free_tokens", "scale_tokens"),
    "reward_model": ("model", "revision", "label", "device", "dtype", "batch_tokens_max", "max_length"),
}
REQUIRED = {"format": ("pattern",), "length": ("free_tokens", "scale_tokens"), "reward_model": ("model",)}
# Settings for where a function runs, how long it may take and how often it may fail; rewards do not depend on them.
OPERATIONAL = (
    "model",
    "revision",
    "device",
    "batch_tokens_max",
    "time_limit_s",
    "load_time_limit_s",
    "failed_share_max",
)
# The name becomes part of metric names and of storage keys.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One reward function of a run.

    `function` is one of BUILT_IN, or "package.module:function" with TRL's or verl's signature. `name` is its name in
    metrics and records; None takes the function's own. `time_limit_s` limits one call: a whole batch for TRL's
    signature and a reward model, one response otherwise. `load_time_limit_s` limits the import and, separately, the
    loading of a model's weights. If the function raises or runs out of time for a response, the response gets
    `failure_reward`, or grading ends at once with an error if `on_failure` is "stop". Grading also ends with the first
    error if the function fails for all responses of an iteration's first micro-batch, or for more than
    `failed_share_max` of those of any. With `filter_groups` each group counts as a micro-batch here. "math" and
    "format" do not fail for what a response says: one that takes them too long gets 0.

    arguments: for a function of the user's own that returns the reward function; it is called with them by name.
    pattern: for "format", a regular expression that must match the whole completion; "." also matches line ends.
    free_tokens, scale_tokens: for "length", which is -max(0, tokens - free_tokens) / scale_tokens, but at least -1.
    model: for "reward_model", a Hugging Face directory with a sequence classification model, or its id on the hub,
    where revision names a branch, tag or commit.
    label: the index of the logit that is the reward; None if the model has only one.
    device: "auto" takes the trainer's. dtype: the dtype of the reward model's weights and activations.
    batch_tokens_max: the most padded tokens of one forward pass of the reward model; a longer input has its own pass.
    max_length: the most tokens of prompt and completion in the reward model's tokens; None takes the model's limit.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    function: str
    name: str | None = None
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    load_time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    failure_reward: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    on_failure: Literal["use_failure_reward", "stop"] = "use_failure_reward"
    failed_share_max: Annotated[float, Field(ge=0, le=1)] = 0.5
    arguments: dict[str, JsonValue] | None = None
    pattern: str | None = None
    free_tokens: Annotated[int, Field(ge=0)] | None = None
    scale_tokens: Annotated[int, Field(ge=1)] | None = None
    model: Annotated[str, Field(min_length=1)] | None = None
    revision: Annotated[str, Field(min_length=1)] | None = None
    label: Annotated[int, Field(ge=0)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_tokens_max: Annotated[int, Field(ge=1)] = 16_384
    max_length: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        if self.function not in BUILT_IN and not user_function.PATTERN.fullmatch(self.function):
            raise ValueError(
                f"function: value {self.function!r}; allowed: {', '.join(map(repr, BUILT_IN))}, "
                f"or 'package.module:function'"
            )
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name: value {self.name!r}; allowed: null, or up to 64 letters, digits and _, the first no digit"
            )
        defaults = {item.name: item.default for item in fields(self)}
        for owner, names in SETTINGS.items():
            for name in names:
                value = getattr(self, name)
                if owner != self.function and value != defaults[name]:
                    raise ValueError(f"{name}: value {value!r}; allowed: nothing, unless the function is {owner!r}")
        if self.arguments is not None and self.function in BUILT_IN:
            raise ValueError("arguments: given; allowed: nothing, unless the function is 'package.module:function'")
        for name in REQUIRED.get(self.function, ()):
            if getattr(self, name) is None:
                raise ValueError(f"{name}: missing; the function {self.function!r} cannot do without it")
        if self.pattern is not None:
            _check_pattern(self.pattern)


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern: value {pattern!r}; allowed: a regular expression: {error}") from None


def reward_names(configs: Sequence[RewardConfig]) -> list[str]:
    """The name of each function in metrics and records, in order.

    It is the configured `name`, or else the part of `function` after the colon, or all of `function` if another
    function has that name too. Raises ValueError if two functions would have the same name.
    """
    unnamed = Counter(config.function for config in configs if config.name is None)
    repeated = [function for function, count in unnamed.items() if count > 1]
    if repeated:
        raise ValueError(
            f"rewards: {repeated[0]!r} is configured twice; allowed: once, with the sum of the weights, "
            "or each with a name of its own"
        )
    short = Counter(config.name or config.function.rpartition(":")[2] for config in configs)
    names = []
    for config in configs:
        own = config.function.rpartition(":")[2]
        names.append(config.name or (own if short[own] == 1 else config.function))
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"rewards: {count} functions are called {name!r}; allowed: each a name of its own")
    return names
