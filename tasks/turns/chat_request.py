"""Requests of agents: the body of OpenAI's /v1/chat/completions, as far as it is served.

What would change how the policy samples is refused by name, because the policy is trained on how the run samples.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.turns.own_template import Message
from tasks.turns.tool_schemas import Schema

MODEL = "policy"
_SHOWN_CHARACTERS_MAX = 80
# Fields without an effect here, and what is allowed of those that could have one.
_WITHOUT_EFFECT = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "seed", "service_tier", "store", "stream_options", "user"}
)
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda value: value == 1 and value is not True, "1"),
    "stream": (lambda value: isinstance(value, bool), "true or false"),
    "logprobs": (lambda value: isinstance(value, bool), "true or false"),
    "top_logprobs": (lambda value: value == 0, "0"),
    "tool_choice": (lambda value: value == "auto", "'auto'"),
    "parallel_tool_calls": (lambda value: value is True, "true"),
    "response_format": (lambda value: value == {"type": "text"}, "{'type': 'text'}"),
    "modalities": (lambda value: value == ["text"], "['text']"),
    "stop": (lambda value: value == [], "none"),
    "logit_bias": (lambda value: value == {}, "none"),
    "frequency_penalty": (lambda value: value == 0, "0"),
    "presence_penalty": (lambda value: value == 0, "0"),
}
_SAMPLING = frozenset({"temperature", "top_p", "max_tokens", "max_completion_tokens", "reasoning_effort", "verbosity"})


class Refusal(Exception):  # noqa: N818 - reads as what happened
    """A request that is not answered, as OpenAI's clients expect to be told of it; `message` is one line."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request of an agent for the policy's next turn.

    Attributes:
        messages: the conversation as a chat template shows it: text as content, calls with name and arguments, and
            results with the names of their tools.
        tools: the schemas of the tools, as the template shows them.
        stream: whether the answer is sent as a stream of events.
        with_usage: whether a stream ends with the numbers of tokens.
        logprobs: whether the answer has log-probs.
    """

    messages: tuple[Message, ...]
    tools: tuple[Schema, ...]
    stream: bool = False
    with_usage: bool = False
    logprobs: bool = False


def read_request(body: bytes) -> ChatRequest:
    """The request in a body; raises Refusal, which names what is not supported."""
    given = read_object(body)
    if given.get("model") != MODEL:
        raise Refusal(
            f"model: value {shown(given.get('model'))}; allowed: {MODEL!r}",
            code="model_not_found",
            param="model",
            status=404,
        )
    fields = {name: value for name, value in given.items() if value is not None}
    for name in fields.keys() - {"model", "messages", "tools"}:
        _check_field(name, fields[name])
    tools = _list("tools", fields.get("tools", []))
    options = fields.get("stream_options", {})
    return ChatRequest(
        _messages(_list("messages", fields.get("messages"))),
        tuple(_tool(f"tools.{index}", tool) for index, tool in enumerate(tools)),
        stream=fields.get("stream", False),
        with_usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=fields.get("logprobs", False),
    )


def arguments_of(text: str) -> Any:
    """The arguments of a call as a chat template takes them: a JSON object, or the text if it is none."""
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _check_field(name: str, value: Any) -> None:
    if name in _WITHOUT_EFFECT:
        return
    if name in _SAMPLING:
        raise Refusal(f"{name}: value {shown(value)}; not supported: the run's section `sampling` decides", param=name)
    if name not in _ALLOWED:
        raise Refusal(f"{name}: not supported", param=name)
    fits, allowed = _ALLOWED[name]
    if not fits(value):
        raise Refusal(f"{name}: value {shown(value)}; allowed: {allowed}", param=name)


def _messages(given: list[Any]) -> tuple[Message, ...]:
    if not given:
        raise Refusal("messages: there is none; allowed: at least one", param="messages")
    names: dict[str, str] = {}
    return tuple(_message(f"messages.{index}", message, names) for index, message in enumerate(given))


def _message(where: str, given: Any, names: dict[str, str]) -> Message:
    """A message as a template takes it. names: of the tools, by the ids of the calls so far."""
    message = _object(where, given)
    role = message.get("role")
    if role in ("system", "developer", "user"):
        return {"role": role, "content": _content(where, message)}
    if role == "tool":
        call = message.get("tool_call_id")
        if not isinstance(call, str) or call not in names:
            raise Refusal(
                f"{where}.tool_call_id: value {shown(call)}; allowed: the id of a call in an earlier message",
                param="messages",
            )
        return {"role": "tool", "name": names[call], "content": _content(where, message)}
    if role != "assistant":
        raise Refusal(
            f"{where}.role: value {shown(role)}; allowed: 'system', 'developer', 'user', 'assistant', 'tool'",
            param="messages",
        )
    if message.get("function_call") is not None:
        raise Refusal(f"{where}.function_call: not supported; allowed: tool_calls", param="messages")
    calls = _list(f"{where}.tool_calls", message.get("tool_calls") or [])
    said: Message = {"role": "assistant", "content": _content(where, message)}
    if calls:
        said["tool_calls"] = [_call(f"{where}.tool_calls.{index}", call, names) for index, call in enumerate(calls)]
    return said


def _call(where: str, given: Any, names: dict[str, str]) -> dict[str, Any]:
    call = _object(where, given)
    function = _object(f"{where}.function", call.get("function"))
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(call.get("id"), str) or not isinstance(name, str) or not isinstance(arguments, str):
        raise Refusal(f"{where}: allowed: an id, and a function with a name and arguments as text", param="messages")
    names[call["id"]] = name
    return {"type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


def _content(where: str, message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, each in enumerate(_list(f"{where}.content", content)):
        part = _object(f"{where}.content.{index}", each)
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refusal(
                f"{where}.content.{index}.type: value {shown(part.get('type'))}; allowed: 'text'", param="messages"
            )
        texts.append(part["text"])
    return "".join(texts)


def _tool(where: str, given: Any) -> Schema:
    tool = _object(where, given)
    function = _object(f"{where}.function", tool.get("function"))
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
    if tool.get("type") != "function" or not isinstance(function.get("name"), str) or not isinstance(properties, dict):
        raise Refusal(
            f"{where}: allowed: {{'type': 'function', 'function': {{'name', 'description', 'parameters'}}}}, whose "
            "parameters are the JSON schema of an object",
            param="tools",
        )
    whole = {"type": "object", "properties": {}} | parameters
    return {"type": "function", "function": {**function, "parameters": whole}}


def _object(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Refusal(f"{where}: value {shown(given)}; allowed: an object", param=where.partition(".")[0])
    return given


def _list(where: str, given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise Refusal(f"{where}: value {shown(given)}; allowed: a list", param=where.partition(".")[0])
    return given


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; raises Refusal."""
    try:
        given = json.loads(body, parse_constant=_no_number)
        json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body cannot be read as JSON: {_line(error)}") from None
    if not isinstance(given, dict):
        raise Refusal(f"the body is {shown(given)}; allowed: a JSON object")
    return given


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def shown(value: object) -> str:
    """A value as a message shows it, cut."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}..."


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN_CHARACTERS_MAX]
