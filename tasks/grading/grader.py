"""Grader: the configured rewards together, their weighted sum, and what a failure counts.

Knows nothing of groups or advantages, and nothing of how a function is run.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tasks.grading.arithmetic import ArithmeticReward
from tasks.grading.config import RewardConfig
from tasks.grading.isolation import IsolatedReward
from tasks.grading.reward import GradingCase, GradingError, Reward, RewardOutcome

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Graded:
    """A response's reward: the weighted sum of `values`, which hold None where a function was not applicable.

    `values` and `errors` are by function name; where there is an error the value is the configured failure_reward.
    """

    response: int
    reward: float
    values: dict[str, float | None]
    errors: dict[str, str]


class Grader:
    """All reward functions of a run, loaded once. Used by one thread; close it, or use it in a with statement."""

    def __init__(self, configs: Sequence[RewardConfig]) -> None:
        """Load every function; raises GradingError for the first that cannot be used."""
        if not configs:
            raise GradingError("rewards: no function is configured; allowed: one or more")
        self._configs = tuple(configs)
        self._rewards: list[Reward] = []
        try:
            for name, config in zip(_names(configs), configs, strict=True):
                self._rewards.append(_open_reward(name, config))
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
        """The functions' names in order, as in metrics: the part after the colon where that is unambiguous."""
        return tuple(reward.name for reward in self._rewards)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise GradingError when a function needs a column that the prompts do not have."""
        for reward in self._rewards:
            for alternatives in reward.needs:
                if not set(alternatives) & set(columns):
                    wanted = " or ".join(map(repr, alternatives))
                    there = ", ".join(map(repr, sorted(columns))) or "none"
                    raise GradingError(f"missing reward column: {reward.name} needs {wanted}; there are: {there}")

    def grade(self, cases: Sequence[GradingCase]) -> list[Graded]:
        """Grade finished responses, in order.

        A function that fails for a response counts as its failure_reward; functions that say None are left out of the
        sum, and when all do, all have failed. Raises GradingError for a failure where on_failure is "stop".
        """
        for case in cases:
            self.check_columns(case.columns)
        outcomes = [reward.grade(cases) for reward in self._rewards]
        return [self._combine(case, [of_reward[index] for of_reward in outcomes]) for index, case in enumerate(cases)]

    def close(self) -> None:
        """End the functions' processes; harmless when repeated."""
        for reward in self._rewards:
            reward.close()

    def _combine(self, case: GradingCase, outcomes: Sequence[RewardOutcome]) -> Graded:
        if all(outcome.value is None and outcome.error is None for outcome in outcomes):
            outcomes = [
                RewardOutcome(None, f"reward {name} of response {case.response} is None, as is every other")
                for name in self.names
            ]
        values, errors, total = {}, {}, 0.0
        for name, config, outcome in zip(self.names, self._configs, outcomes, strict=True):
            value = outcome.value
            if outcome.error is not None:
                if config.on_failure == "stop":
                    raise GradingError(outcome.error)
                _LOG.warning("%s; it counts as %g", outcome.error, config.failure_reward)
                errors[name] = outcome.error
                value = config.failure_reward
            values[name] = value
            total += 0.0 if value is None else config.weight * value
        return Graded(case.response, total, values, errors)


def _open_reward(name: str, config: RewardConfig) -> Reward:
    if config.function == ArithmeticReward.name:
        return ArithmeticReward()
    return IsolatedReward(name, config.function, config.time_limit_s, config.load_time_limit_s)


def _names(configs: Sequence[RewardConfig]) -> list[str]:
    functions = [config.function for config in configs]
    repeated = [function for function, count in Counter(functions).items() if count > 1]
    if repeated:
        raise GradingError(f"rewards: {repeated[0]!r} is configured twice; allowed: once, with the sum of the weights")
    short = [function.rpartition(":")[2] for function in functions]
    return [name if short.count(name) == 1 else function for name, function in zip(short, functions, strict=True)]
