"""Prompt, PromptSet and PromptError: the common interface of all sources of prompts.

A prompt is text or chat messages. The rest of the prompt's row are columns, kept as plain JSON values for rewards.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from storage.errors import WrongInputError
from tasks.prompts.plain_values import without_nulls

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]


class PromptError(WrongInputError):
    """The prompts are not usable: a file is missing, a row is wrong, or a prompt is too long."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with the columns of its row.

    Attributes:
        id: The prompt's id, unique in its set.
        text_or_messages: Plain text, or a list of {"role", "content"} messages.
        columns: The other columns, as plain JSON values.
        place: The file and line or row, for messages; empty for generated prompts.
        token_ids: Tokens of another run, or of a program that submits tokens, which are taken as they are; None: to be
            tokenised.
    """

    id: str
    text_or_messages: str | list[Message]
    columns: dict[str, Any]
    place: str = field(default="", compare=False)
    token_ids: tuple[int, ...] | None = None


class PromptSet(Protocol):
    """A fixed sequence of prompts, read lazily if the source allows it."""

    @property
    def columns(self) -> frozenset[str]:
        """The columns that every prompt has."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...

    def __iter__(self) -> Iterator[Prompt]: ...

    def place(self, index: int) -> str:
        """Where prompt `index` stands, such as the file and line, for messages."""
        ...


def check_prompt(value: Any, where: str, what: str = "prompt") -> str | list[Message]:
    """Return `value` if it is text or messages; else raise PromptError, whose message begins with `where`.

    what: What the value is, for messages.
    """
    if isinstance(value, str):
        if not value:
            raise PromptError(f"{where}: the {what} is empty text")
        return value
    if isinstance(value, list) and value:
        return [_check_message(message, f"{where}: message {number}") for number, message in enumerate(value)]
    raise PromptError(
        f"{where}: the {what} is {_describe(value)}; allowed: text, or a non-empty list of messages "
        f'{{"role": ..., "content": ...}}'
    )


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(f'{where} is {_describe(message)}; allowed: {{"role": ..., "content": ...}}')
    present: Message = without_nulls(message)
    role, content, calls = present.get("role"), present.get("content"), present.get("tool_calls")
    if role not in ROLES:
        raise PromptError(f"{where} has the role {role!r}; allowed: {', '.join(ROLES)}")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise PromptError(f"{where} has tool_calls that are no list of objects; allowed: a list of calls, or none")
    if content is None and role == "assistant" and calls:
        # Some templates print a null, and others cannot append to it.
        return {**present, "content": ""}
    if isinstance(content, list) and content:
        return {**present, "content": "".join(_text_of_part(part, where) for part in content)}
    if not isinstance(content, str):
        raise PromptError(f"{where} has a content that is {_describe(content)}; allowed: text")
    return present


def _text_of_part(part: Any, where: str) -> str:
    """The text of a part of a message's content; the caller joins the parts, as chat templates with parts do."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = repr(part.get("type")) if isinstance(part, Mapping) else _describe(part)
        raise PromptError(f'{where} has a part that is {kind}; allowed: text, or parts {{"type": "text", "text": ...}}')
    return text


def _describe(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list) and not value:
        return "an empty list"
    return f"of type {type(value).__name__}"
