"""Requests to `gleaner serve`: the bodies of OpenAI's /v1/completions and /v1/chat/completions, as far as served.

A field that would change how tokens are drawn is allowed with the run's own value alone, and refused by name otherwise.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from storage.digests import digest_of
from tasks.configuration.sampling import SamplingConfig
from tasks.prompts.prompt import Message
from tasks.turns.chat_request import MODEL, ChatRequest, Refusal, read_object, read_request, shown
from tasks.turns.tool_schemas import Schema

N_MAX = 128
TOKEN_ID_MAX = (1 << 32) - 1
_LENGTHS = ("max_tokens", "max_completion_tokens")
# Of text requests: fields without a meaning here, and the only value that asks for nothing.
_NOTHING: Mapping[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "presence_penalty": 0,
    "stop": [],
    "stream": False,
}
# Of both kinds: extensions of vLLM.
_NOTHING_OF_VLLM: Mapping[str, Any] = {
    "ignore_eos": False,
    "min_p": 0,
    "min_tokens": 0,
    "repetition_penalty": 1,
    "stop_token_ids": [],
}


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What a client asks for.

    Attributes:
        prompt: text, token ids, or chat messages.
        n: the number of responses.
        max_tokens: the most tokens of each answer.
        logprobs: whether the answer has log-probs.
        with_token_ids: whether the answer has token ids.
        chat: the request as agents make it; None for /v1/completions.
        body: the digest of all that was asked.
    """

    prompt: str | tuple[int, ...] | list[Message]
    n: int
    max_tokens: int
    logprobs: bool
    with_token_ids: bool
    chat: ChatRequest | None
    body: str

    @property
    def tools(self) -> tuple[Schema, ...]:
        """The schemas of the tools of which the policy is told."""
        return () if self.chat is None else self.chat.tools


def read_served(body: bytes, kind: Literal["text", "chat"], sampling: SamplingConfig) -> ServedRequest:
    """The request in a body; raises Refusal, which names the field, its value and what is allowed."""
    given = read_object(body)
    digest = digest_of(json.dumps([kind, given], sort_keys=True).encode())
    fields = {name: value for name, value in given.items() if value is not None}
    n = _number(fields, "n", 1, N_MAX, 1)
    longest = sampling.max_completion_length
    max_tokens = min(_number(fields, name, 1, longest, longest) for name in _LENGTHS)
    with_token_ids = _flag(fields, "return_token_ids")
    for name in ("temperature", "top_p", "top_k"):
        _only(fields, name, getattr(sampling, name), f"which is the run's sampling.{name}")
    _only(fields, "skip_special_tokens", sampling.skip_special_tokens, "which is the run's")
    for name, value in _NOTHING_OF_VLLM.items():
        _only(fields, name, value, "or none")
    if "seed" in fields:
        raise Refusal(
            f"seed: value {shown(fields['seed'])}; allowed: none, because the run's seed decides", param="seed"
        )
    if kind == "chat":
        chat = read_request(json.dumps(fields).encode())
        _check_chat(chat, n, with_token_ids=with_token_ids)
        messages = [dict(message) for message in chat.messages]
        return ServedRequest(messages, n, max_tokens, chat.logprobs, with_token_ids, chat, digest)
    if fields.pop("model", MODEL) != MODEL:
        message = f"model: value {shown(given['model'])}; allowed: {MODEL!r}"
        raise Refusal(message, code="model_not_found", param="model", status=404)
    logprobs = "logprobs" in fields
    _only(fields, "logprobs", 0, "for the log-probs of the sampled tokens, or none")
    for name, value in _NOTHING.items():
        _only(fields, name, value, "or none")
    prompt = _prompt(fields.pop("prompt", None))
    fields.pop("user", None)
    for name in fields:
        raise Refusal(f"{name}: not supported", param=name)
    return ServedRequest(prompt, n, max_tokens, logprobs, with_token_ids, None, digest)


def _check_chat(chat: ChatRequest, n: int, *, with_token_ids: bool) -> None:
    if chat.stream and n > 1:
        raise Refusal(f"n: value {n}; allowed with stream: 1", param="n")
    if chat.stream and with_token_ids:
        message = "return_token_ids: value True; allowed with stream: false, because events hold no token ids"
        raise Refusal(message, param="return_token_ids")


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(_is_integer(each) and 0 <= each <= TOKEN_ID_MAX for each in given):
        return tuple(given)
    raise Refusal(f"prompt: value {shown(given)}; allowed: text, or a list of token ids, not empty", param="prompt")


def _number(fields: dict[str, Any], name: str, least: int, most: int, default: int) -> int:
    value = fields.pop(name, default)
    if not _is_integer(value) or not least <= value <= most:
        of = " (the run's sampling.max_completion_length)" if name in _LENGTHS else ""
        raise Refusal(f"{name}: value {shown(value)}; allowed: {least} to {most}{of}", param=name)
    return int(value)


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.pop(name, False)
    if not isinstance(value, bool):
        raise Refusal(f"{name}: value {shown(value)}; allowed: true or false", param=name)
    return value


def _only(fields: dict[str, Any], name: str, allowed: Any, why: str) -> None:
    """Take a field with its only value; JSON's true is no 1."""
    value = fields.pop(name, allowed)
    if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
        raise Refusal(f"{name}: value {shown(value)}; allowed: {json.dumps(allowed)}, {why}", param=name)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
