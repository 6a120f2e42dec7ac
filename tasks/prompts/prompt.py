"""Prompt, PromptSet and PromptError: the common interface of all sources of prompts.

A prompt is text or chat messages. The rest of its row are columns, kept as plain JSON values for the rewards.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]


class PromptError(ValueError):
    """The prompts are not usable: a file is missing, a row is wrong, or a prompt is too long."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: plain text or a list of {"role", "content"} messages, and the other columns of its row."""

    id: str
    text_or_messages: str | list[Message]
    columns: dict[str, Any]


class PromptSet(Protocol):
    """A fixed sequence of prompts, read lazily if the source allows it."""

    @property
    def columns(self) -> frozenset[str]:
        """The columns that every prompt has."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...

    def __iter__(self) -> Iterator[Prompt]: ...


def check_prompt(value: Any, where: str) -> str | list[Message]:
    """Return `value` if it is text or messages; else raise PromptError, whose message begins with `where`."""
    if isinstance(value, str):
        if not value:
            raise PromptError(f"{where}: the prompt is empty text")
        return value
    if isinstance(value, list) and value:
        return [_check_message(message, f"{where}: message {number}") for number, message in enumerate(value)]
    raise PromptError(
        f"{where}: the prompt is {_describe(value)}; allowed: text, or a non-empty list of messages "
        f'{{"role": ..., "content": ...}}'
    )


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(f'{where} is {_describe(message)}; allowed: {{"role": ..., "content": ...}}')
    # Arrow gives all messages of a column the same keys; a null means that the key is absent.
    present = {key: value for key, value in message.items() if value is not None}
    role, content = present.get("role"), present.get("content")
    if role not in ROLES:
        raise PromptError(f"{where} has the role {role!r}; allowed: {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise PromptError(f"{where} has a content that is {_describe(content)}; allowed: text")
    return present


def _describe(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list) and not value:
        return "an empty list"
    return f"of type {type(value).__name__}"
