"""The arguments of the chat template for a prompt's messages: tools, keyword arguments, and the generation prompt.

As in TRL, the columns `tools` and `chat_template_kwargs` of a row are arguments of the template, too.
"""

import json
from collections.abc import Mapping
from typing import Any

from tasks.configuration.data import DataConfig, no_argument
from tasks.prompts.plain_values import without_nulls
from tasks.prompts.prompt import Message, PromptError

TOOLS, ARGUMENTS = "tools", "chat_template_kwargs"


def rendering(messages: list[Message], columns: Mapping[str, Any], data: DataConfig) -> dict[str, Any]:
    """The arguments of apply_chat_template for a prompt's messages; raises PromptError."""
    continues = data.continue_final_message and messages[-1]["role"] == "assistant"
    how: dict[str, Any] = {"add_generation_prompt": not continues}
    if continues:
        how["continue_final_message"] = True
    tools = tools_of(columns)
    return how | ({"tools": tools} if tools else {}) | arguments_of(columns, data)


def names_tools(columns: Mapping[str, Any]) -> bool:
    """Whether the column `tools` holds anything, tools or not."""
    return bool(_parsed(columns.get(TOOLS)))


def tools_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools in a row's columns, as objects or as the JSON text of them; [] if the column holds none or others."""
    value = _parsed(columns.get(TOOLS))
    is_tools = isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)
    return value if is_tools else []


def arguments_of(columns: Mapping[str, Any], data: DataConfig) -> dict[str, Any]:
    """The template's keyword arguments: the run's, overridden by the row's; PromptError for unusable arguments."""
    given = columns.get(ARGUMENTS)
    own = _parsed(given)
    if own is None:
        return dict(data.chat_template_kwargs)
    if not isinstance(own, Mapping):
        raise PromptError(f"the column {ARGUMENTS} is of type {type(given).__name__}; allowed: an object, or null")
    reserved = no_argument(own)
    if reserved is not None:
        raise PromptError(f"the column {ARGUMENTS} has {reserved!r}; allowed: arguments of the chat template")
    return {**data.chat_template_kwargs, **own}


def _parsed(value: Any) -> Any:
    """A column's value without nulls, which Arrow may have added; JSON text is parsed and keeps its nulls."""
    if not isinstance(value, str):
        return without_nulls(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
