"""Answers of `gleaner serve` in the forms of OpenAI's API, with vLLM's fields for token ids."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage.digests import digest_of
from tasks.external.groups import Response
from tasks.serving.served_model import ServedModel
from tasks.serving.served_request import ServedRequest
from tasks.serving.windows import Answer
from tasks.turns import chat_reply
from tasks.turns.agent_language import Spoken
from tasks.turns.chat_reply import Completion
from tasks.turns.chat_request import MODEL


def text_answer(name: str, request: ServedRequest, answer: Answer, model: ServedModel) -> dict[str, Any]:
    """The body of an answer to /v1/completions."""
    choices: list[dict[str, Any]] = []
    prompt = list(answer.groups[0].prompt_token_ids)
    for index, response in enumerate(_asked(request, answer)):
        ids, reason = _cut(request, response)
        choice = {"index": index, "text": model.text(ids), "finish_reason": reason, "logprobs": None}
        if request.logprobs:
            choice["logprobs"] = _text_logprobs(model.pieces(ids), response.logprobs[: len(ids)].tolist())
        if request.with_token_ids:
            choice |= {"prompt_token_ids": prompt, "token_ids": ids}
        choices.append(choice)
    head = {"id": f"cmpl-{name}", "object": "text_completion", "created": answer.created_s, "model": MODEL}
    said = sum(len(_cut(request, response)[0]) for response in _asked(request, answer))
    usage = {"prompt_tokens": len(prompt), "completion_tokens": said, "total_tokens": len(prompt) + said}
    return {**head, "choices": choices, "usage": usage}


def chat_answer(name: str, request: ServedRequest, answer: Answer, model: ServedModel) -> dict[str, Any]:
    """The body of an answer to /v1/chat/completions that is not a stream."""
    assert request.chat is not None
    bodies = []
    for index, response in enumerate(_asked(request, answer)):
        body = chat_reply.whole(_completion(name, index, request, answer, response, model), request.chat)
        [choice] = body["choices"]
        choice["index"] = index
        if request.with_token_ids:
            choice["token_ids"] = _cut(request, response)[0]
        bodies.append(body)
    said = sum(body["usage"]["completion_tokens"] for body in bodies)
    whole = bodies[0] | {"choices": [choice for body in bodies for choice in body["choices"]]}
    whole["usage"] |= {"completion_tokens": said, "total_tokens": whole["usage"]["prompt_tokens"] + said}
    if request.with_token_ids:
        whole["prompt_token_ids"] = list(answer.groups[0].prompt_token_ids)
    return whole


def chat_stream(name: str, request: ServedRequest, answer: Answer, model: ServedModel) -> Iterator[bytes]:
    """The events of an answer to /v1/chat/completions as a stream; its text is one event."""
    assert request.chat is not None
    [response] = _asked(request, answer)
    return chat_reply.stream(_completion(name, 0, request, answer, response, model), request.chat)


def sampled(request: ServedRequest, answer: Answer) -> list[tuple[list[int], npt.NDArray[np.float32], str]]:
    """Tokens, log-probs (float32 [n]) and finish reason ("stop" or "length") of each response of an answer."""
    cut = [(*_cut(request, response), response) for response in _asked(request, answer)]
    return [(ids, response.logprobs[: len(ids)], reason) for ids, reason, response in cut]


def _asked(request: ServedRequest, answer: Answer) -> list[Response]:
    """The first n of the responses; groups have a size of their own."""
    return [response for group in answer.groups for response in group.responses][: request.n]


def _cut(request: ServedRequest, response: Response) -> tuple[list[int], Literal["stop", "length"]]:
    """The tokens that the client asked for, and why they end: what a shorter limit would have given is their prefix."""
    ids: list[int] = response.token_ids.tolist()
    is_stopped = response.finish_reason == "stop" and len(ids) <= request.max_tokens
    return ids[: request.max_tokens], "stop" if is_stopped else "length"


def _completion(
    name: str, index: int, request: ServedRequest, answer: Answer, response: Response, model: ServedModel
) -> Completion:
    """The completion of a response, the index-th of its answer; names of calls are equal in each answer of a key."""
    ids, reason = _cut(request, response)
    # Without tools the text of the response is left as it is.
    spoken = model.spoken(ids, request.tools) if request.tools else Spoken(model.text(ids), None, ())
    names = [digest_of(f"{name}/{index}/{number}".encode()) for number in range(len(spoken.calls))]
    return Completion(
        name=name,
        content=spoken.content,
        thinking=spoken.thinking,
        calls=chat_reply.served_calls(spoken.calls, names),
        finish_reason="tool_calls" if spoken.calls and reason == "stop" else reason,
        prompt_tokens=len(answer.groups[0].prompt_token_ids),
        pieces=model.pieces(ids),
        logprobs=tuple(response.logprobs[: len(ids)].tolist()),
        created_s=answer.created_s,
    )


def _text_logprobs(pieces: tuple[str, ...], logprobs: list[float]) -> dict[str, Any]:
    offsets = list(accumulate(map(len, pieces[:-1]), initial=0)) if pieces else []
    return {"tokens": list(pieces), "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
