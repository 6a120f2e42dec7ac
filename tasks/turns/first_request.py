"""The first request of an agent: what its conversation begins with, in the place of an environment's opening."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.turns.own_template import Message
from tasks.turns.tool_schemas import Schema


@dataclass(frozen=True, slots=True)
class FirstRequest:
    """The first request of an agent, as a chat template takes it.

    Attributes:
        messages: the messages of the conversation.
        tools: the schemas of the tools.
    """

    messages: tuple[Message, ...]
    tools: tuple[Schema, ...]

    def text(self) -> str:
        """As a prompt's `opening` holds it: JSON, with keys in the agent's order, which a template may show."""
        return json.dumps({"messages": self.messages, "tools": self.tools}, separators=(",", ":"), ensure_ascii=False)


def read_opening(opening: str | None) -> FirstRequest:
    """The first request in a prompt's `opening`; raises ValueError for one that is none."""
    given = json.loads(opening or "null")
    if not isinstance(given, dict) or given.keys() != {"messages", "tools"}:
        raise ValueError("the prompt's opening is no first request of an agent")
    messages: Sequence[Message] = given["messages"]
    return FirstRequest(tuple(messages), tuple(given["tools"]))
