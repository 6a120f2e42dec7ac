"""Bodies of requests, good and hostile."""

import json

import pytest

from tasks.turns.chat_request import ChatRequest, Refusal, read_request
from tests.agent_functions import ADD

USER = {"role": "user", "content": "add"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


def body(**fields):
    return json.dumps({"model": "policy", "messages": [USER], **fields}).encode()


def test_a_request_holds_what_a_template_shows():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "dd"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    asked = read_request(body(messages=messages, tools=[ADD], stream=True, stream_options={"include_usage": True}))
    assert asked == ChatRequest(
        (
            {"role": "system", "content": "s"},
            {"role": "user", "content": "add"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
            },
            {"role": "tool", "name": "add", "content": "3"},
        ),
        (ADD,),
        stream=True,
        with_usage=True,
    )


def test_a_tool_without_parameters_has_none():
    bare = {"type": "function", "function": {"name": "go"}}
    (tool,) = read_request(body(tools=[bare])).tools
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": True, "top_logprobs": 0, "tool_choice": "auto", "parallel_tool_calls": True},
        {"temperature": None, "max_tokens": None, "stop": None, "response_format": {"type": "text"}, "seed": 3},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "frequency_penalty": 0, "presence_penalty": 0.0},
    ],
)
def test_fields_without_an_effect_are_allowed(fields):
    assert read_request(body(**fields)).messages == (USER,)


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        (b"", None, "the body cannot be read as JSON: "),
        (b'{"model": "policy", "seed": NaN}', None, "NaN is no JSON number"),
        (b'{"model": "policy", "messages": "\\ud800"}', None, "cannot be read as JSON: UnicodeEncodeError"),
        (b"[" * 100_000, None, "cannot be read as JSON: RecursionError"),
        (b"[1]", None, r"the body is \[1\]; allowed: a JSON object"),
        (b"{}", "model", "^model: value None; allowed: 'policy'"),
        (body(model="gpt-5"), "model", "^model: value 'gpt-5'; allowed: 'policy'"),
        (body(n=2), "n", "^n: value 2; allowed: 1"),
        (body(n=True), "n", "^n: value True; allowed: 1"),
        (body(temperature=0.2), "temperature", "^temperature: value 0.2; not supported: the run's section `sampling`"),
        (body(max_tokens=5), "max_tokens", "^max_tokens: value 5; not supported"),
        (body(stream="yes"), "stream", "^stream: value 'yes'; allowed: true or false"),
        (body(top_logprobs=5), "top_logprobs", "^top_logprobs: value 5; allowed: 0"),
        (body(stop=["\n"]), "stop", "^stop: value"),
        (body(tool_choice="required"), "tool_choice", "^tool_choice: value 'required'; allowed: 'auto'"),
        (body(response_format={"type": "json_object"}), "response_format", "^response_format: "),
        (body(functions=[]), "functions", "^functions: not supported"),
        (body(messages=[]), "messages", "^messages: there is none"),
        (body(messages={}), "messages", "^messages: value {}; allowed: a list"),
        (body(messages=["a"]), "messages", r"^messages\.0: value 'a'; allowed: an object"),
        (body(messages=[{"role": "king"}]), "messages", r"^messages\.0\.role: value 'king'; allowed: 'system', "),
        (
            body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "messages",
            r"^messages\.0\.content\.0\.type: value 'image_url'; allowed: 'text'",
        ),
        (
            body(messages=[{"role": "user", "content": 3}]),
            "messages",
            r"^messages\.0\.content: value 3; allowed: a list",
        ),
        (
            body(messages=[USER, {"role": "tool", "tool_call_id": "x", "content": ""}]),
            "messages",
            r"^messages\.1\.tool_call_id: value 'x'; allowed: the id of a call in an earlier message",
        ),
        *(
            (
                body(messages=[{"role": "assistant", "tool_calls": [call]}]),
                "messages",
                r"^messages\.0\.tool_calls\.0: allowed: an id, and a function",
            )
            for call in (
                {"function": {"name": "a", "arguments": "{}"}},
                {"id": 1, "function": {"name": "a", "arguments": "{}"}},
                {"id": "c", "function": {"name": None, "arguments": "{}"}},
                {"id": "c", "function": {"name": "a", "arguments": {}}},
            )
        ),
        (
            body(messages=[{"role": "assistant", "function_call": {"name": "a"}}]),
            "messages",
            r"^messages\.0\.function_call: not supported",
        ),
        (body(tools=[{"type": "web_search"}]), "tools", r"^tools\.0\.function: value None; allowed: an object"),
        (
            body(tools=[{"type": "function", "function": {"name": "a", "parameters": [1]}}]),
            "tools",
            r"^tools\.0: allowed: ",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(given, param, message):
    with pytest.raises(Refusal, match=message) as raised:
        read_request(given)
    assert raised.value.param == param
    assert raised.value.status == (404 if param == "model" else 400)
    assert "\n" not in raised.value.message
