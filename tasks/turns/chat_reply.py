"""Answers to agents: a turn of the policy in the form of OpenAI's /v1/chat/completions, whole or as a stream."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tasks.turns.chat_request import MODEL, ChatRequest, Refusal
from tasks.turns.policy_turn import ToolCall


@dataclass(frozen=True, slots=True)
class ServedCall:
    """A call of a tool.

    Attributes:
        call_id: the id of the call, equal whenever the turn is served again.
        name: the name of the tool.
        arguments: the arguments as text, usually JSON.
    """

    call_id: str
    name: str
    arguments: str


def served_calls(calls: Sequence[ToolCall], names: Sequence[str]) -> tuple[ServedCall, ...]:
    """Calls as the policy wrote them in OpenAI's form; names: one for each, for its id."""
    return tuple(
        ServedCall(f"call_{name}", call.name, _as_text(call.arguments)) for name, call in zip(names, calls, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Completion:
    """A turn of the policy as an agent reads it.

    Attributes:
        name: the id of the completion, equal whenever the turn is served again.
        content: the text without calls and thoughts.
        thinking: the thought that the model's response template sets apart; None: no thought.
        calls: the calls of the turn.
        finish_reason: the end of the turn, in OpenAI's words.
        prompt_tokens: the number of tokens before the turn, the prompt's included.
        pieces: the text of each token of the turn, the stop token included.
        logprobs: the log-probs of the turn's tokens, natural log.
        created_s: the time of the reply, in seconds since 1970.
    """

    name: str
    content: str
    thinking: str | None
    calls: tuple[ServedCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    pieces: tuple[str, ...]
    logprobs: tuple[float, ...]
    created_s: int


def whole(completion: Completion, request: ChatRequest) -> dict[str, Any]:
    """The body of an answer that is not a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.content or None, "refusal": None}
    if not completion.calls:
        message["content"] = completion.content
    if completion.thinking is not None:
        message["reasoning_content"] = completion.thinking
    if completion.calls:
        message["tool_calls"] = _calls(completion)
    choice = {"index": 0, "message": message, "finish_reason": completion.finish_reason}
    choice["logprobs"] = _logprobs(completion, request)
    return {**_head(completion, "chat.completion"), "choices": [choice], "usage": _usage(completion)}


def stream(completion: Completion, request: ChatRequest) -> Iterator[bytes]:
    """The events of an answer as a stream. The turn is complete from the beginning, so the text is one event."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if completion.thinking is not None:
        deltas.append({"reasoning_content": completion.thinking})
    if completion.content:
        deltas.append({"content": completion.content})
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(_calls(completion))]
    head = _head(completion, "chat.completion.chunk")
    logprobs = _logprobs(completion, request)
    for number, delta in enumerate([*deltas, {}]):
        is_last = number == len(deltas)
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs if number == 0 else None,
            "finish_reason": completion.finish_reason if is_last else None,
        }
        yield _event({**head, "choices": [choice]})
    if request.with_usage:
        yield _event({**head, "choices": [], "usage": _usage(completion)})
    yield b"data: [DONE]\n\n"


def refused(refusal: Refusal) -> dict[str, Any]:
    """The body of an answer to a request that is refused."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def models() -> dict[str, Any]:
    """The body of /v1/models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "gleaner"}]}


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _head(completion: Completion, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{completion.name}", "object": kind, "created": completion.created_s, "model": MODEL}


def _calls(completion: Completion) -> list[dict[str, Any]]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in completion.calls
    ]


def _logprobs(completion: Completion, request: ChatRequest) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    tokens = zip(completion.pieces, completion.logprobs, strict=True)
    return {"content": [_token(*each) for each in tokens], "refusal": None}


def _token(piece: str, logprob: float) -> dict[str, Any]:
    # A token may hold a part of a character only, which has no text.
    written = None if "\ufffd" in piece else list(piece.encode())
    return {"token": piece, "logprob": logprob, "bytes": written, "top_logprobs": []}


def _usage(completion: Completion) -> dict[str, int]:
    said = len(completion.pieces)
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": said,
        "total_tokens": completion.prompt_tokens + said,
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
