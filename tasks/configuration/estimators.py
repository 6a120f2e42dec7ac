"""Advantage estimators: one table with the function, the rewards and the needs of each.

An estimator is added here, with its function, a test, and its row in docs/guide/algorithms.md. A function of the user's
own takes the same place as one of the table. Nothing here imports torch; the process that trains imports the function.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tasks.configuration.user_function import PATTERN, load_or_refuse

Scope = Literal["group", "batch"]
# What a function of the user's own may take.
OWN_ARGUMENTS = ("rewards", "lengths", "counted")
_OWN_FORM = "a function of rewards, and of lengths and counted if it wants them, that can be imported"


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """How rewards become advantages.

    Attributes:
        function: "package.module:function". The call has the function's parameters by name, as far as
            `tasks.learning.advantage.advantages_of` offers each: tensors, and the fields in `reads`.
        scope: The rewards that one call must see: of a "group", or of the whole step ("batch"). "response": of a
            response alone, and a call takes any number.
        per_token: The result has a number per token instead of a number per response.
        needs_critic: It reads the values of a critic.
        group_baseline: Groups of equal rewards teach nothing, and may be filtered out.
        reads: The fields of the section `algorithm` that have an effect with this estimator only.
    """

    function: str
    scope: Scope | Literal["response"] = "group"
    per_token: bool = False
    needs_critic: bool = False
    group_baseline: bool = False
    reads: frozenset[str] = frozenset()

    @property
    def is_own(self) -> bool:
        """Whether it is a function of the user's own."""
        return not self.function.startswith(_ADVANTAGE)

    def check(self, *, with_turns: bool = False) -> None:
        """Import a function of the user's own; raises ValueError, in one line, for an unusable one.

        with_turns: responses may fail, so a function that sees the whole step must take `counted`.
        """
        if not self.is_own:
            return
        function = self.load()
        if with_turns and self.scope == "batch" and "counted" not in inspect.signature(function).parameters:
            raise self._refused("it takes no `counted`, which says which responses did not fail, in a run with turns")

    def load(self) -> Callable[..., Any]:
        """Import the function; raises ValueError, in one line, for an unusable one."""
        function = load_or_refuse(self.function, self._refused)
        if self.is_own:
            self._check_parameters(function)
        return function

    def _check_parameters(self, function: Callable[..., Any]) -> None:
        try:
            signature = inspect.signature(function)
            signature.bind(**{name: None for name in OWN_ARGUMENTS if name in signature.parameters})
        except (TypeError, ValueError) as error:
            raise self._refused(f"its parameters do not fit: {error}") from None
        if OWN_ARGUMENTS[0] not in signature.parameters:
            raise self._refused(f"its parameters are {signature}")

    def _refused(self, reason: str) -> ValueError:
        line = f"algorithm.advantage_estimator: value {self.function!r}; allowed: {_OWN_FORM}, but {reason}"
        return ValueError(" ".join(line.split()))


_ADVANTAGE = "tasks.learning.advantage:"
ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(
        function=_ADVANTAGE + "group_advantages",
        group_baseline=True,
        reads=frozenset({"scale_rewards", "advantage_eps"}),
    ),
    "rloo": Estimator(function=_ADVANTAGE + "leave_one_out_advantages", group_baseline=True),
    "reinforce_plus_plus": Estimator(
        function=_ADVANTAGE + "reinforce_plus_plus_advantages",
        scope="batch",
        per_token=True,
        reads=frozenset({"gamma", "advantage_eps"}),
    ),
    "reinforce_plus_plus_baseline": Estimator(
        function=_ADVANTAGE + "reinforce_plus_plus_baseline_advantages",
        scope="batch",
        group_baseline=True,
        reads=frozenset({"advantage_eps"}),
    ),
    "gae": Estimator(
        function=_ADVANTAGE + "critic_advantages",
        scope="batch",
        per_token=True,
        needs_critic=True,
        reads=frozenset({"gamma", "gae_lambda", "advantage_eps", "value_clip"}),
    ),
}
DEFAULT = "grpo"
# What stands for an estimator with `algorithm.kind` "sft": each example counts alike.
ALIKE = Estimator(function=_ADVANTAGE + "equal_advantages", scope="response")
# And with "dpo", whose loss takes the weights of the chosen tokens from it.
PAIRED = Estimator(function=_ADVANTAGE + "weights_of_chosen", scope="batch")
_READ_BY_OWN = frozenset({"advantage_scope"})
# The fields that some estimator reads and another does not.
OPTIONS = frozenset().union(*(estimator.reads for estimator in ESTIMATORS.values()), _READ_BY_OWN)


def estimator_of(name: str, own_scope: Scope) -> Estimator:
    """The estimator that the configuration names: one of the table, or a function of the user's own.

    own_scope: the scope of the user's own. With `filter_groups` the user says that equal rewards teach it nothing.
    Raises ValueError if the name is neither.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if not PATTERN.fullmatch(name):
        raise ValueError(
            f"advantage_estimator: value {name!r}; allowed: {', '.join(map(repr, ESTIMATORS))}, "
            "or 'package.module:function'"
        )
    return Estimator(function=name, scope=own_scope, group_baseline=True, reads=_READ_BY_OWN)
