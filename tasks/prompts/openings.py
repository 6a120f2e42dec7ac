"""Openings: what the `reset` of an environment adds to the prompt of a group."""

from collections.abc import Mapping
from typing import Any

from tasks.prompts.prompt import Message, Prompt, PromptError


def with_opening(prompt: Prompt, opening: str | None) -> str | list[Message]:
    """The prompt's messages with the opening at the end of the user's last message; PromptError without one."""
    messages = prompt.text_or_messages
    if opening is None or isinstance(messages, str):
        return messages
    asked = _last_of_user(messages)
    if asked is None:
        raise PromptError(
            f"prompt {prompt.id!r}: no message is the user's; allowed with an environment whose reset returns text: "
            "at least one, to which that text is appended"
        )
    last = messages[asked]
    return [*messages[:asked], {**last, "content": last["content"] + opening}, *messages[asked + 1 :]]


def reset_columns(
    prompt: str | list[Message], columns: Mapping[str, Any], opening: str | None = None
) -> dict[str, Any]:
    """The arguments of `reset`: the prompt's row of the data set, with the messages before the opening was added."""
    asked = None if not opening or isinstance(prompt, str) else _last_of_user(prompt)
    if asked is None or isinstance(prompt, str):
        return {"prompt": prompt, **columns}
    last = prompt[asked]
    before = {**last, "content": last["content"].removesuffix(opening or "")}
    return {"prompt": [*prompt[:asked], before, *prompt[asked + 1 :]], **columns}


def _last_of_user(messages: list[Message]) -> int | None:
    return max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
