"""Reward: what turns finished responses into numbers, and the values that cross that border.

Knows nothing of processes, weights or configuration; text in, one outcome per response out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Needs = tuple[tuple[str, ...], ...]
"""Columns a reward cannot do without: of every inner tuple at least one must be there."""


class GradingError(Exception):
    """A reward function cannot be used, or its failure is configured to stop the run."""


@dataclass(frozen=True, slots=True)
class GradingCase:
    """A finished response: its id, the prompt as text or messages, the decoded completion, its tokens, its row."""

    response: int
    prompt: str | list[dict[str, Any]]
    completion: str
    completion_ids: tuple[int, ...]
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """What one function says of one response: a finite value, None for not applicable, or an error and no value."""

    value: float | None
    error: str | None = None


class Reward(Protocol):
    """A reward function, ready to be called. Used by one thread."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs: ...

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        """One outcome per case, in order. What goes wrong is an outcome's error, which names the response."""
        ...

    def close(self) -> None:
        """Give processes back."""
        ...
