"""The section `rewards`: the functions, their settings, weights and time limits, and the reward of a failure.

It imports no reward function; the process that runs a function does.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue

from tasks.configuration import user_function
from tasks.configuration.older_form import ARGUMENTS
from tasks.configuration.problems import float_in

BUILT_IN = ("arithmetic", "environment", "format", "length", "math", "reward_model")
# The settings that belong to one built-in function only, and those of them that it requires.
SETTINGS: dict[str, tuple[str, ...]] = {"reward_model": ("model", "revision", "label", "dtype")}
REQUIRED = {"reward_model": ("model",)}
# Settings for where a function runs and how long one call may take; rewards do not depend on them.
OPERATIONAL = (
    "model",
    "revision",
    "time_limit_s",
)
_LEAST = {"free_tokens": 0, "scale_tokens": 1}
# The name becomes part of metric names and of storage keys.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def _failure(value: object) -> object:
    """What a failure counts as; raises ValueError with one line for both kinds.

    Text such as "1e-1", as YAML 1.1 reads it, is a number.
    """
    written = float_in(value)
    found = value if written is None else written
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    if is_number or found == "stop":
        return found
    raise ValueError("allowed: a finite number, or stop")


OnFailure = Annotated[float | Literal["stop"], BeforeValidator(_failure)]


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One reward function of a run.

    A function fails for a response if a call raises, runs out of time or returns no number. "math" and "format" do not
    fail for the text of a response: a text that takes too long gets 0.

    Attributes:
        function: A name in BUILT_IN, or "package.module:function" with TRL's or verl's signature.
        name: The name in metrics and records; None takes the function's own.
        weight: The factor of the function's value in the reward, which is a weighted sum.
        time_limit_s: Seconds of one call: a whole micro-batch for TRL's signature and a reward model, else one
            response.
        on_failure: The value of a response for which the function failed; "stop" ends grading with the first failure.
        arguments: A function of the user's own is called with these arguments by name, and returns the reward function.
            "format" needs `pattern`, a regular expression for the whole completion; "." matches line ends. "length"
            needs `free_tokens` and `scale_tokens`: the reward is -max(0, tokens - free_tokens) / scale_tokens, at
            least -1.
        model: Only for "reward_model": a Hugging Face directory with a sequence classification model, or an id on the
            hub.
        revision: Of an id in `model`: branch, tag or commit.
        label: The index of the logit that is the reward; None if the model has one logit.
        dtype: The dtype of the reward model's weights and activations.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    function: str
    name: str | None = None
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    on_failure: OnFailure = 0.0
    arguments: dict[str, JsonValue] | None = None
    model: Annotated[str, Field(min_length=1)] | None = None
    revision: Annotated[str, Field(min_length=1)] | None = None
    label: Annotated[int, Field(ge=0)] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

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
        if self.function in BUILT_IN:
            _check_arguments(self.function, self.arguments)
        for name in REQUIRED.get(self.function, ()):
            if getattr(self, name) is None:
                raise ValueError(f"{name}: missing; the function {self.function!r} cannot do without it")


def _check_arguments(function: str, arguments: dict[str, JsonValue] | None) -> None:
    """Raise ValueError unless a built-in function can be called with these arguments."""
    names = ARGUMENTS.get(function)
    if names is None:
        if arguments is not None:
            whose = ", ".join(map(repr, ARGUMENTS))
            raise ValueError(f"arguments: given; allowed: nothing, unless the function is {whose} or your own")
        return
    given = arguments or {}
    for name in names:
        if name not in given:
            raise ValueError(f"arguments.{name}: missing; the function {function!r} cannot do without it")
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"arguments.{name}: unknown; allowed with the function {function!r}: {', '.join(names)}")
        _check_argument(name, value)


def _check_argument(name: str, value: JsonValue) -> None:
    least = _LEAST.get(name)
    if least is not None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"arguments.{name}: value {value!r}; allowed: an integer of at least {least}")
        return
    if not isinstance(value, str):
        raise ValueError(f"arguments.{name}: value {value!r}; allowed: a regular expression")  # noqa: TRY004 - for pydantic
    try:
        re.compile(value, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"arguments.{name}: value {value!r}; allowed: a regular expression: {error}") from None


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
