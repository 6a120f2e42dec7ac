"""Reward: the protocol of reward functions, which turn finished responses into numbers, and the values they exchange.

A reward takes text and gives one outcome per response; it knows nothing of processes, weights or configuration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from storage.errors import UserCodeError

Needs = tuple[tuple[str, ...], ...]
"""The columns that a reward needs: at least one of every inner tuple."""


class GradingError(UserCodeError):
    """A reward function cannot be used, or its failure is configured to stop the run."""


@dataclass(frozen=True, slots=True)
class GradedConversation:
    """A response with turns.

    messages: chat messages from the prompt to the end; the first `asked` of them are the prompt. policy_length: the
    tokens that the policy sampled. reward: what the environment returned at the end; None if it has no reward.
    """

    messages: list[dict[str, Any]]
    asked: int
    policy_length: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class GradingCase:
    """A finished response: its number, prompt (text or messages), decoded completion, tokens, and prompt columns.

    conversation: in a run with turns. The completion is then the text of the policy's last turn, and the tokens are all
    of the response's, observations included.
    """

    response: int
    prompt: str | list[dict[str, Any]]
    completion: str
    completion_ids: tuple[int, ...]
    columns: dict[str, Any]
    conversation: GradedConversation | None = None

    @property
    def policy_length(self) -> int:
        """The number of tokens that the policy sampled."""
        return len(self.completion_ids) if self.conversation is None else self.conversation.policy_length


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """One function's result for one response: a finite value, None for not applicable, or an error and no value.

    given_up: why a verifier of Gleaner's own stopped looking at an answer, whose value is then 0. Whatever an answer
    says, it is no error of such a verifier.
    """

    value: float | None
    error: str | None = None
    given_up: str | None = None


class Reward(Protocol):
    """A reward function that is ready to be called. One thread uses it."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs: ...

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        """One outcome per case, in order. A failure becomes the outcome's error, which names the response.

        Raises GradingError instead for the first failure of a reward that is configured to stop at it.
        """
        ...

    def close(self) -> None:
        """End the function's processes."""
        ...
