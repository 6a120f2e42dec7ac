"""Reading of a turn of the policy: its text, and the calls that it makes.

Calls are written as the model's own tokenizer says (`response_template`), or, where it says nothing, as Qwen or Gemma
write them. Nothing that a policy writes raises: a call that cannot be made has a problem instead.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from tasks.turns.tool_schemas import Schema, call_problem, name_of

DEPTH_MAX = 50
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GEMMA = re.compile(r"<\|tool_call>call:([\w.-]+)(.*?)(?:<tool_call\|>|\Z)", re.DOTALL)
_GEMMA_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_]\w*)\s*:")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it.

    Attributes:
        name: the name of the tool; empty if the policy wrote none.
        arguments: a JSON object by parameter name; the written text if the arguments are no object.
        problem: the reason against the call, in one line; None if the call fits the tool's schema.
    """

    name: str
    arguments: JsonValue
    problem: str | None


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """A turn of the policy.

    Attributes:
        content: the text without calls.
        calls: the calls, in the order of the text.
        thinking: the part that the tokenizer's `response_template` takes for a thought; None: no such part.
    """

    content: str
    calls: tuple[ToolCall, ...]
    thinking: str | None = None


Reader = Callable[[str, Sequence[Schema]], PolicyTurn]


def read_tagged(text: str, schemas: Sequence[Schema]) -> PolicyTurn:
    """Qwen's calls: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or with <function=name> inside."""
    return PolicyTurn(
        _TAGGED.sub("", text).strip(), tuple(_tagged(match[1], schemas) for match in _TAGGED.finditer(text))
    )


def read_gemma(text: str, schemas: Sequence[Schema]) -> PolicyTurn:
    """Gemma 4's calls: <|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>."""
    calls = (_called(match[1], _gemma_json(match[2]), match[2], schemas) for match in _GEMMA.finditer(text))
    return PolicyTurn(_GEMMA.sub("", text).strip(), tuple(calls))


def read_parsed(message: dict[str, Any], schemas: Sequence[Schema]) -> PolicyTurn:
    """What transformers' parse_response made of a turn."""
    calls = tuple(_parsed(call, schemas) for call in message.get("tool_calls") or ())
    return PolicyTurn(_text(message.get("content")), calls, message.get("thinking"))


def unreadable(text: str, reason: str) -> PolicyTurn:
    """A turn whose calls cannot be told apart: one call without a name, whose problem is the reason."""
    return PolicyTurn("", (ToolCall("", text, f"the call cannot be read: {reason}"),))


def _tagged(body: str, schemas: Sequence[Schema]) -> ToolCall:
    if written := _FUNCTION.search(body):
        name = written[1].strip()
        values = {
            key.strip(): _typed(value, name, key.strip(), schemas) for key, value in _PARAMETER.findall(written[2])
        }
        return _checked(name, values, schemas)
    try:
        call = _json(body)
    except ValueError as error:
        return ToolCall("", body, f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", body, 'the call is not of the form {"name": ..., "arguments": {...}}')
    return _checked(call["name"], call.get("arguments", {}), schemas)


def _parsed(call: Any, schemas: Sequence[Schema]) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return ToolCall("", json.dumps(call, default=str), "the call has no name")
    arguments = function.get("arguments", {})
    written = json.dumps(arguments, default=str)
    # OpenAI's form has the arguments as text.
    return _called(function["name"], arguments if isinstance(arguments, str) else written, written, schemas)


def _called(name: str, body: str, written: str, schemas: Sequence[Schema]) -> ToolCall:
    """The call with the arguments that `body` holds as JSON; `written` is what the policy wrote for them."""
    try:
        return _checked(name, _json(body), schemas)
    except ValueError as error:
        return ToolCall(name, written, f"the arguments of {name} are not JSON: {error}")


def _checked(name: str, arguments: Any, schemas: Sequence[Schema]) -> ToolCall:
    kept: JsonValue = arguments if isinstance(arguments, dict) else json.dumps(arguments)
    return ToolCall(name, kept, call_problem(schemas, name, arguments))


def _json(text: str) -> Any:
    """The JSON value in a text; raises ValueError with the fault in one line."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if any(depth > DEPTH_MAX for depth in _depths(value)):
        raise ValueError("it is nested too deep")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _depths(value: Any) -> Iterator[int]:
    """The depth of every value inside a JSON value, found without recursion."""
    open_values = [(value, 0)]
    while open_values:
        inner, depth = open_values.pop()
        yield depth
        items = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
        open_values += [(item, depth + 1) for item in items]


def _gemma_json(body: str) -> str:
    """Gemma's arguments as JSON: texts are between quotes of its own, and names have none."""
    pieces = body.split(_GEMMA_QUOTE)
    return "".join(
        json.dumps(piece) if index % 2 else _BARE_KEY.sub(r'\1"\2":', piece) for index, piece in enumerate(pieces)
    )


def _typed(value: str, name: str, parameter: str, schemas: Sequence[Schema]) -> Any:
    """A parameter that was written without quotes: text where the schema wants text, else JSON if it is any."""
    tool = next((schema["function"] for schema in schemas if name_of(schema) == name), None)
    properties: Schema = {} if tool is None else tool["parameters"]["properties"]
    if properties.get(parameter, {}).get("type") == "string":
        return value
    try:
        return _json(value)
    except ValueError:
        return value


def _text(content: Any) -> str:
    return content if isinstance(content, str) else ""
