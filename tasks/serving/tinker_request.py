"""Tinker's `asample` as a request to `gleaner serve`: its name follows from the client's session and counter.

A field that the run cannot honour is refused by name, by the rules of /v1/completions.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from resources.visible_text import visible
from storage.digests import digest_of
from tasks.configuration.sampling import SamplingConfig
from tasks.serving.served_request import ServedRequest, read_served
from tasks.turns.chat_request import MODEL, Refusal, read_object, shown

SESSION = re.compile(r"[0-9a-f]{32}")
SAMPLING_SESSION = re.compile(r"[0-9a-f]{32}:sample:[0-9]{1,9}")
SEQ_ID_MAX = (1 << 63) - 1
_FIELDS = frozenset({"sampling_session_id", "seq_id", "num_samples", "prompt", "sampling_params", "type"})
# The only value of fields that ask for something else, which is that of a client that asks for none of it.
_NOTHING: Mapping[str, Any] = {
    "prompt_logprobs": False,
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
}
Stops = Callable[[], Mapping[int, str]]


def read_fields(body: bytes) -> dict[str, Any]:
    """The fields of a body that are given; raises Refusal."""
    given = read_object(body)
    return {str(name): value for name, value in given.items() if value is not None}


def check_model(fields: Mapping[str, Any]) -> None:
    """Refuse every model but the run's policy as it is."""
    if fields.get("base_model", MODEL) != MODEL:
        message = f"base_model: value {shown(fields['base_model'])}; allowed: {MODEL!r}"
        raise Refusal(message, code="model_not_found", param="base_model", status=404)
    if "model_path" in fields:
        message = f"model_path: value {shown(fields['model_path'])}; allowed: none, with base_model {MODEL!r}"
        raise Refusal(message, code="model_not_found", param="model_path", status=404)


def read_sample(body: bytes, sampling: SamplingConfig, stops: Stops) -> tuple[str, ServedRequest]:
    """The name of a sample request, and the request; raises Refusal, which names the field and what is allowed.

    stops: gives the run's stop tokens with their texts; called for a request that names some.
    """
    fields = read_fields(body)
    # First, because a client that computes log-probs sets the sampling to values of its own.
    for name, value in _NOTHING.items():
        given = fields.pop(name, value)
        if given != value:
            raise Refusal(
                f"{name}: value {shown(given)}; allowed: {json.dumps(value)}, because members only generate",
                param=name,
            )
    check_model(fields)
    fields.pop("base_model", None)
    name = _name(fields)
    asked = {"prompt": _tokens(fields.get("prompt")), "n": fields.get("num_samples", 1)}
    params = fields.get("sampling_params", {})
    if not isinstance(params, dict):
        raise Refusal(f"sampling_params: value {shown(params)}; allowed: an object", param="sampling_params")
    params = {each: value for each, value in params.items() if value is not None}
    if "stop" in params:
        _check_stop(params.pop("stop"), stops())
    if params.get("top_k") == -1:
        params["top_k"] = 0
    for each in sorted(set(fields) - _FIELDS):
        raise Refusal(f"{visible(each)}: not supported", param=visible(each))
    body = json.dumps(params | asked | {"logprobs": 0, "return_token_ids": True}).encode()
    try:
        return name, read_served(body, "text", sampling)
    except Refusal as error:
        if error.param != "n":
            raise
        raise Refusal(f"num_samples{error.message.removeprefix('n')}", param="num_samples") from None


def _name(fields: Mapping[str, Any]) -> str:
    """The digest of what identifies a request, and of no key of OpenAI's clients, because keys have no space."""
    session, number = fields.get("sampling_session_id"), fields.get("seq_id")
    if not isinstance(session, str) or not SAMPLING_SESSION.fullmatch(session):
        message = f"sampling_session_id: value {shown(session)}; allowed: what create_sampling_session has answered"
        raise Refusal(message, param="sampling_session_id")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= SEQ_ID_MAX:
        raise Refusal(f"seq_id: value {shown(number)}; allowed: 0 to {SEQ_ID_MAX}", param="seq_id")
    return digest_of(f"tinker {session} {number}".encode())


def _tokens(prompt: Any) -> list[Any]:
    """The token ids of a prompt, which are checked with the request."""
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list) or not all(isinstance(chunk, dict) for chunk in chunks):
        raise Refusal(f"prompt: value {shown(prompt)}; allowed: chunks of tokens", param="prompt")
    found = []
    for chunk in chunks:
        if chunk.get("type", "encoded_text") != "encoded_text" or not isinstance(chunk.get("tokens"), list):
            message = f"prompt: a chunk of type {shown(chunk.get('type'))}; allowed: 'encoded_text', with tokens"
            raise Refusal(message, param="prompt")
        found += chunk["tokens"]
    return found


def _check_stop(stop: Any, stops: Mapping[int, str]) -> None:
    """Refuse all but stop tokens of the run, as ids or as texts."""
    named = [stop] if isinstance(stop, str) else stop
    if not isinstance(named, list) or not named or not all(_is_among(each, stops) for each in named):
        known = ", ".join(f"{text!r} ({token})" for token, text in stops.items())
        message = f"stop: value {shown(stop)}; allowed: none, or stop tokens of the run, which all end it: {known}"
        raise Refusal(message, param="stop")


def _is_among(given: Any, stops: Mapping[int, str]) -> bool:
    if isinstance(given, str):
        return given in stops.values()
    return isinstance(given, int) and not isinstance(given, bool) and given in stops
