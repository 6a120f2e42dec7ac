"""How messages with tools are put into a chat template that knows no tools: as text, in the words that Qwen reads.

The tools stand in the system message, or before the first message of the user if there is none. Calls are text of the
assistant, and their results are a message of the user.
"""

import json
from collections.abc import Sequence
from typing import Any

from tasks.turns.tool_schemas import Schema

Message = dict[str, Any]

_TOLD = """You can call these functions. Each line is the JSON schema of one:
<tools>
{schemas}
</tools>

To call a function, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"a parameter": "its value"}}}}
</tool_call>
You may make several calls; the results come in the next message."""


def in_plain_messages(messages: Sequence[Message], schemas: Sequence[Schema]) -> list[Message]:
    """The messages without tool calls and without the role `tool`, for a template that knows neither."""
    plain: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            # Templates may insist that the user and the assistant take turns, so the results of a turn are one message.
            if plain and plain[-1].get("answers"):
                plain[-1]["content"] += f"\n{answer}"
            else:
                plain.append({"role": "user", "content": answer, "answers": True})
        elif message.get("tool_calls"):
            calls = [_written(call) for call in message["tool_calls"]]
            content = "\n".join([text for text in (message.get("content"),) if text] + calls)
            plain.append({"role": message["role"], "content": content})
        else:
            plain.append(dict(message))
    told = _TOLD.format(schemas="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))
    first = next((m for m in plain if m["role"] in ("system", "developer", "user")), None)
    if first is not None:
        is_user = first["role"] == "user"
        first["content"] = f"{told}\n\n{first['content']}" if is_user else f"{first['content']}\n\n{told}"
    return [{key: value for key, value in message.items() if key != "answers"} for message in plain]


def _written(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
