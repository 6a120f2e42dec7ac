"""Policy losses: one table with the function, the fields and the tokens of each.

A loss is added here, with its function, a test, and its row in docs/guide/algorithms.md. A function of the user's own
takes the same place as one of the table. Nothing here imports torch; the process that trains imports the function.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tasks.configuration.user_function import PATTERN, load_or_refuse

_OWN_FORM = "a function of one LossInputs that can be imported"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How advantages and log-probs become the loss of each token.

    Attributes:
        function: "package.module:function". One of the table is called with those fields of
            `tasks.learning.policy_losses.LossInputs`, and those of `reads`, that its parameters name, the user's own
            with the LossInputs.
        depends_on: The values on which the loss of a token depends: its own ("token"), also the ratio of its whole
            response ("ratio"), any of its response ("response"), or any of both responses of its group ("pair").
        modes: The values of loss_agg_mode that are allowed; None: all.
        reads: The fields of the section `algorithm` that have an effect with this loss only.
    """

    function: str
    depends_on: Literal["token", "ratio", "response", "pair"] = "token"
    modes: frozenset[str] | None = None
    reads: frozenset[str] = frozenset()

    @property
    def is_own(self) -> bool:
        """Whether it is a function of the user's own."""
        return not self.function.startswith(_LOSS)

    def check(self) -> None:
        """Import a function of the user's own; raises ValueError, in one line, for an unusable one."""
        if self.is_own:
            self.load()

    def load(self) -> Callable[..., Any]:
        """Import the function; raises ValueError, in one line, for an unusable one."""
        function = load_or_refuse(self.function, self._refused)
        if self.is_own:
            try:
                inspect.signature(function).bind(None)
            except (TypeError, ValueError) as error:
                raise self._refused(f"its parameters do not fit: {error}") from None
        return function

    def _refused(self, reason: str) -> ValueError:
        line = f"algorithm.policy_loss: value {self.function!r}; allowed: {_OWN_FORM}, but {reason}"
        return ValueError(" ".join(line.split()))


_LOSS = "tasks.learning.policy_losses:"
_BOUNDS = frozenset({"clip_ratio_low", "clip_ratio_high"})
LOSSES: dict[str, Loss] = {
    "clip": Loss(function=_LOSS + "clipped_policy_loss", reads=_BOUNDS | {"clip_ratio_c"}),
    "gspo": Loss(
        function=_LOSS + "gspo_policy_loss",
        depends_on="ratio",
        # Its objective is a mean over responses.
        modes=frozenset({"seq-mean-token-mean"}),
        reads=_BOUNDS,
    ),
    "cispo": Loss(function=_LOSS + "cispo_policy_loss", reads=_BOUNDS),
    "reinforce": Loss(function=_LOSS + "reinforce_policy_loss"),
}
DEFAULT_LOSS = "clip"
# The loss of `algorithm.kind` "sft", which has no choice.
LIKELIHOOD = Loss(function=_LOSS + "likelihood_loss")
# The loss of "dpo". Its responses come in pairs, the chosen one first.
PREFERENCE = Loss(
    function=_LOSS + "preference_loss", depends_on="pair", reads=frozenset({"beta", "label_smoothing", "rpo_alpha"})
)
# The fields that some loss reads and another does not.
LOSS_OPTIONS = frozenset().union(*(loss.reads for loss in LOSSES.values()))


def loss_of(name: str) -> Loss:
    """The loss that the configuration names: one of the table, or a function of the user's own.

    Raises ValueError if the name is neither.
    """
    if name in LOSSES:
        return LOSSES[name]
    if not PATTERN.fullmatch(name):
        raise ValueError(
            f"policy_loss: value {name!r}; allowed: {', '.join(map(repr, LOSSES))}, or 'package.module:function'"
        )
    return Loss(function=name, depends_on="response", reads=LOSS_OPTIONS)
