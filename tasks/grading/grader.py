"""Grader: calls the configured reward functions, sums their weighted values, and handles their failures.

The grader knows neither groups nor advantages, nor the processes of functions.
"""

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from resources.user_process import LOAD_TIME_LIMIT_S
from storage.paths import expanded
from tasks.configuration.rewards import BUILT_IN, RewardConfig, reward_names
from tasks.configuration.turns import TurnsConfig
from tasks.grading.in_process_rewards import ArithmeticReward, EnvironmentReward, LengthReward
from tasks.grading.isolation import IsolatedReward
from tasks.grading.reward import (
    GradedConversation,
    GradingCase,
    GradingError,
    Needs,
    Reward,
    RewardOutcome,
)
from tasks.prompts.prompt import Prompt, PromptSet

_LOG = logging.getLogger(__name__)
# Of a micro-batch's responses: a function that fails for more than half of them teaches the value of failures.
FAILED_SHARE_MAX = 0.5
_CHECKED_PROMPTS = 8
# In one call, which has the time limit of loading: a long formula takes a tenth of a second on a slow machine.
_CHECKED_TRUTHS = 200
_NO_FOLDERS: Mapping[str, Path] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Graded:
    """The reward of a response.

    Attributes:
        response: The response's number.
        reward: The weighted sum of `values`.
        values: The value of each function by name: None for a function that does not apply, on_failure for a
            function with an error, and 0 for a verifier that gave the answer up.
        errors: The errors by function name.
        given_up: The reasons of verifiers that gave the answer up, by function name.
    """

    response: int
    reward: float
    values: dict[str, float | None]
    errors: dict[str, str]
    given_up: dict[str, str] = field(default_factory=dict)


class Grader:
    """All reward functions of a run, loaded once. For a single thread; to be closed, or used in a with statement."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        folders: Mapping[str, Path] = _NO_FOLDERS,
        device: str = "auto",
        turns: TurnsConfig | None = None,
    ) -> None:
        """Load every function; raises GradingError for the first function that cannot be used.

        Args:
            configs: The configured functions.
            folders: The folders of reward models by name, in place of the configured `model`. Weights are loaded for
                the first response.
            device: The device of reward models with device "auto".
            turns: The run's section of turns; names the credentials visible to functions.
        """
        self._configs = tuple(configs)
        self._rewards: list[Reward] = []
        self._has_graded = False
        try:
            for name, config in zip(_names(configs), configs, strict=True):
                self._rewards.append(_open_reward(name, config, folders, device, turns))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' names in order, as in metrics and records."""
        return tuple(reward.name for reward in self._rewards)

    @property
    def sources(self) -> dict[str, str]:
        """The digest of the file with the code, for each of the user's functions by name."""
        isolated = [reward for reward in self._rewards if isinstance(reward, IsolatedReward)]
        return {reward.name: reward.source for reward in isolated if reward.source is not None}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise GradingError when a function needs a column that the prompts do not have."""
        for reward in self._rewards:
            _check_needs(reward, columns)

    def grade(self, cases: Sequence[GradingCase]) -> list[Graded]:
        """Grade finished responses, in order.

        A function that fails for a response counts as its on_failure. Functions that return None are left out of
        the sum; if every function returns None, every function counts as failed. Raises GradingError, with the first
        error, for a failure if on_failure is "stop", for a function that fails for all of the first cases, and for a
        function whose share of failed cases exceeds FAILED_SHARE_MAX. An answer that a verifier gives up is no failure.
        """
        for case in cases:
            self.check_columns(case.columns)
        outcomes = [reward.grade(cases) for reward in self._rewards]
        graded = [self._combine(case, [of_reward[index] for of_reward in outcomes]) for index, case in enumerate(cases)]
        self._check_failures(graded)
        self._tell_of_given_up(graded)
        return graded

    def close(self) -> None:
        """End the functions' processes; a repeated call does nothing."""
        for reward in self._rewards:
            reward.close()

    def _check_failures(self, graded: Sequence[Graded]) -> None:
        """Raise GradingError for a function that mostly fails, because on_failure would teach that a crash pays."""
        if not graded:
            return
        for name in self.names:
            errors = [each.errors[name] for each in graded if name in each.errors]
            all_of_first = not self._has_graded and len(errors) == len(graded)
            if all_of_first or len(errors) > FAILED_SHARE_MAX * len(graded):
                raise GradingError(
                    f"reward {name} fails for {len(errors)} of {len(graded)} responses; allowed: at most "
                    f"a share of {FAILED_SHARE_MAX:g}, and not all of the first; the first "
                    f"error: {errors[0]}"
                )
        self._has_graded = True

    def _tell_of_given_up(self, graded: Sequence[Graded]) -> None:
        for name in self.names:
            found = [each.given_up[name] for each in graded if name in each.given_up]
            if found:
                _LOG.warning(
                    "reward %s gave up on %d of %d answers, which count as 0; the first: %s",
                    name,
                    len(found),
                    len(graded),
                    found[0],
                )

    def _combine(self, case: GradingCase, outcomes: Sequence[RewardOutcome]) -> Graded:
        if all(outcome.value is None and outcome.error is None for outcome in outcomes):
            outcomes = [
                RewardOutcome(None, f"reward {name} of response {case.response} is None, as are all others")
                for name in self.names
            ]
        values, errors, total = {}, {}, 0.0
        for name, config, outcome in zip(self.names, self._configs, outcomes, strict=True):
            value = outcome.value
            if outcome.error is not None:
                if config.on_failure == "stop":
                    raise GradingError(outcome.error)
                _LOG.warning("%s; it counts as %g", outcome.error, config.on_failure)
                errors[name] = outcome.error
                value = config.on_failure
            values[name] = value
            total += 0.0 if value is None else config.weight * value
        given_up = {
            name: told for name, outcome in zip(self.names, outcomes, strict=True) if (told := outcome.given_up)
        }
        return Graded(case.response, total, values, errors, given_up)


def check_rewards(
    configs: Sequence[RewardConfig],
    columns: Collection[str] | None,
    held: Collection[str] = frozenset(),
    prompts: PromptSet | None = None,
    *,
    is_new: bool = True,
    turns: TurnsConfig | None = None,
) -> list[str]:
    """Raise GradingError for the first function that cannot be used, or lacks a column; otherwise return doubts.

    Args:
        configs: The configured functions; each is loaded, except reward models in `held`.
        columns: The columns of the prompts; None if prompts cannot be read.
        held: The names of reward models that were checked earlier.
        prompts: Each reward model tokenises a few prompts, spread from the first to the last.
        is_new: True for a new run. "math" then parses each ground truth, and names rows by file and line or else by
            number from 0; each of the user's own functions is called for the first prompt.
        turns: The run's section.
    """
    tried: dict[int, RewardOutcome] = {}
    with ExitStack() as stack:
        for place, (name, config) in enumerate(zip(_names(configs), configs, strict=True)):
            if name in held:
                continue
            reward = stack.enter_context(closing(_open_reward(name, config, _NO_FOLDERS, "auto", turns)))
            if columns is not None:
                _check_needs(reward, columns)
            if prompts is None or not isinstance(reward, IsolatedReward):
                continue
            if config.model is not None:
                reward.check([_case(place, prompts[place]) for place in _places(len(prompts))])
            elif config.function == "math" and is_new:
                for cases in _with_distinct_truths(prompts, reward.needs):
                    reward.check(cases)
            elif config.function not in BUILT_IN and is_new:
                tried[place] = reward.attempt(_empty_case(prompts[0], with_turns=turns is not None))
                _check_attempt(place, config, tried[place])
    return _doubts(configs, tried)


def _empty_case(prompt: Prompt, *, with_turns: bool) -> GradingCase:
    """An empty response to a prompt: a stop token, whichever id."""
    conversation = None
    if with_turns and not isinstance(prompt.text_or_messages, str):
        asked = prompt.text_or_messages
        conversation = GradedConversation([*asked, {"role": "assistant", "content": ""}], len(asked), 1, None)
    return GradingCase(0, prompt.text_or_messages, "", (0,), prompt.columns, conversation)


def _check_attempt(place: int, config: RewardConfig, outcome: RewardOutcome) -> None:
    if outcome.error is not None:
        told = " ".join(outcome.error.split())
        allowed = "" if "; allowed: " in told else "; allowed: a finite number or None"
        raise GradingError(f"{_tried(place, config)} {told}{allowed}")


def _doubts(configs: Sequence[RewardConfig], tried: Mapping[int, RewardOutcome]) -> list[str]:
    """A line about each function that returned None; raises GradingError if every configured function returned None."""
    without = [place for place, outcome in tried.items() if outcome.value is None]
    if without and len(without) == len(configs):
        raise GradingError(
            f"{_tried(without[0], configs[without[0]])} gave None; allowed: a number from one of rewards"
        )
    return [
        f"{_tried(place, configs[place])} gave None, which leaves it out of the reward; a number counts"
        for place in without
    ]


def _tried(place: int, config: RewardConfig) -> str:
    return f"rewards.{place}: value {config.function!r}, which for the first prompt and an empty completion"


def _with_distinct_truths(prompts: PromptSet, needs: Needs) -> Iterator[list[GradingCase]]:
    """Yield a case for each distinct value of the needed columns, in lists of at most _CHECKED_TRUTHS.

    The prompt of a case is the place (file and line) of the first row with the value.
    """
    wanted = {column for alternatives in needs for column in alternatives}
    distinct: dict[str, GradingCase] = {}
    for place, prompt in enumerate(prompts):
        truths = {column: prompt.columns[column] for column in sorted(wanted & prompt.columns.keys())}
        distinct.setdefault(json.dumps(truths), GradingCase(place, prompt.place, "", (), truths))
    cases = list(distinct.values())
    yield from (cases[start : start + _CHECKED_TRUTHS] for start in range(0, len(cases), _CHECKED_TRUTHS))


def _case(place: int, prompt: Prompt) -> GradingCase:
    return GradingCase(place, prompt.text_or_messages, "x", (), {})


def _places(size: int) -> list[int]:
    """At most _CHECKED_PROMPTS indices, spread evenly from the first to the last of `size`."""
    last = _CHECKED_PROMPTS - 1
    return sorted({number * (size - 1) // last for number in range(_CHECKED_PROMPTS)}) if size else []


def _check_needs(reward: Reward, columns: Collection[str]) -> None:
    for alternatives in reward.needs:
        if not set(alternatives) & set(columns):
            wanted = " or ".join(map(repr, alternatives))
            there = ", ".join(map(repr, sorted(columns))) or "none"
            raise GradingError(f"missing reward column: {reward.name} needs {wanted}; there are: {there}")


def _open_reward(
    name: str, config: RewardConfig, folders: Mapping[str, Path], device: str, turns: TurnsConfig | None
) -> Reward:
    if config.function == "arithmetic":
        return ArithmeticReward(name)
    if config.function == "environment":
        return EnvironmentReward(name)
    given: dict[str, Any] = config.arguments or {}
    if config.function == "length":
        return LengthReward(name, **given)
    settings: dict[str, Any] = {}
    if config.arguments is not None:
        settings = given if config.function == "format" else {"arguments": given}
    if config.model is not None:
        settings = {
            "name": name,
            "folder": str(folders.get(name, expanded(config.model))),
            "label": config.label,
            "device": device,
            "dtype": config.dtype,
        }
    stops = config.on_failure == "stop"
    return IsolatedReward(
        name,
        config.function,
        config.time_limit_s,
        LOAD_TIME_LIMIT_S,
        settings,
        stops=stops,
        environment_variables=() if turns is None else turns.environment_variables,
    )


def _names(configs: Sequence[RewardConfig]) -> list[str]:
    if not configs:
        raise GradingError("rewards: no function is configured; allowed: one or more")
    try:
        return reward_names(configs)
    except ValueError as error:
        raise GradingError(str(error)) from None
