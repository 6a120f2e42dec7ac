"""Reward: the protocol of reward functions, which turn finished responses into numbers, and the protocol's values.

A reward takes text and gives an outcome per response, without knowledge of processes, weights or configuration.
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
    """The conversation of a response with turns.

    Attributes:
        messages: Chat messages from the prompt to the end.
        num_prompt_messages: The number of messages of the prompt, which come first.
        policy_length: The number of tokens that the policy sampled.
        reward: The environment's reward at the end; None without a reward.
    """

    messages: list[dict[str, Any]]
    num_prompt_messages: int
    policy_length: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class GradingCase:
    """A finished response, as a reward function gets the response.

    Attributes:
        response: The response's number.
        prompt: The prompt: text or messages.
        completion: The decoded completion; with turns, the text of the policy's last turn.
        completion_ids: The tokens of the response, observations included.
        columns: The columns of the prompt's row.
        conversation: The conversation in a run with turns; None without turns.
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
    """The result of a function for a response.

    Attributes:
        value: A finite number; None if the function does not apply or has failed.
        error: The error of a function that failed; None for a success. A verifier of Gleaner's own has no error because
            of an answer's text.
        given_up: The reason why a verifier of Gleaner's own stopped looking at an answer, whose value is then 0.
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
