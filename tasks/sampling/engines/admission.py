"""Admission: every engine checks a request before decoding, and an EngineError names the wrong field or response.

Because the engines share the checks, a bad request gets the same message from every engine. No tensors are involved.
"""

from collections.abc import Collection, Sequence

from tasks.sampling.engines.engine import EngineError, FinishReason, GenerationRequest

DTYPES = ("float32", "bfloat16", "float16")


def check_sizes(dtype: str, max_responses_in_flight: int, context_length: int) -> None:
    """Raise EngineError for a dtype or size that no engine supports."""
    if dtype not in DTYPES:
        raise EngineError(f"dtype: value {dtype!r}; allowed: {', '.join(DTYPES)}")
    if max_responses_in_flight < 1 or context_length < 2:
        raise EngineError(
            f"max_responses_in_flight: value {max_responses_in_flight}, context_length: value {context_length}; "
            "allowed: at least 1 and at least 2"
        )


def check_idle(version: int, in_flight: Collection[int]) -> None:
    """Raise EngineError if weights of `version` would be loaded while responses are in flight."""
    if in_flight:
        raise EngineError(f"weights {version}: {len(in_flight)} responses in flight; allowed: none while loading")


def check_requests(
    requests: Sequence[GenerationRequest],
    in_flight: Collection[int],
    *,
    max_responses_in_flight: int,
    vocab_size: int,
    context_length: int,
) -> None:
    """Raise EngineError if any request cannot be served, or if there would be too many responses in flight."""
    room = max_responses_in_flight - len(in_flight)
    if len(requests) > room:
        raise EngineError(
            f"response {requests[room].response}: {len(in_flight)} responses in flight and {len(requests)} to start; "
            f"allowed: {max_responses_in_flight} in all"
        )
    seen = set(in_flight)
    for request in requests:
        if request.response in seen:
            raise EngineError(f"response {request.response} is in flight already")
        seen.add(request.response)
        _check_request(request, vocab_size, context_length)


def finish_reason(request: GenerationRequest, token: int, generated: int, context_length: int) -> FinishReason | None:
    """Why a response ends with `token`, when it then has `generated` tokens; None if it goes on."""
    if token in request.sampling.stop_token_ids:
        return FinishReason.STOP
    return None if tokens_left(request, generated, context_length) > 0 else FinishReason.LENGTH


def tokens_left(request: GenerationRequest, generated: int, context_length: int) -> int:
    """How many tokens a response with `generated` tokens may still get, if no stop token ends it."""
    return min(request.sampling.max_completion_length, context_length - len(request.prompt_ids)) - generated


def _check_request(request: GenerationRequest, vocab_size: int, context_length: int) -> None:
    name = f"response {request.response}"
    prompt, generated, sampling = request.prompt_ids, request.generated_ids, request.sampling
    if not prompt:
        raise EngineError(f"{name}: prompt_ids is empty; allowed: at least one token")
    if len(prompt) + len(generated) >= context_length:
        raise EngineError(
            f"{name}: prompt of {len(prompt)} tokens and {len(generated)} generated ones; "
            f"allowed: fewer than context_length {context_length} together"
        )
    for field, token_ids in (("prompt_ids", prompt), ("generated_ids", generated)):
        if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise EngineError(f"{name}: {field} has token id {wrong}; allowed: 0..{vocab_size - 1}")
    if generated and (reason := finish_reason(request, generated[-1], len(generated), context_length)):
        raise EngineError(f"{name}: its {len(generated)} generated tokens end it already ({reason.value})")
    if not 0 <= request.noise_key < 1 << 64:
        raise EngineError(f"{name}: noise_key {request.noise_key}; allowed: 0..2^64-1")
    if not 0 <= sampling.temperature < float("inf"):
        raise EngineError(f"{name}: temperature {sampling.temperature}; allowed: 0 and above")
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"{name}: top_p {sampling.top_p}; allowed: above 0, up to 1")
    if sampling.top_k < 0 or sampling.max_completion_length < 1:
        raise EngineError(
            f"{name}: top_k {sampling.top_k}, max_completion_length {sampling.max_completion_length}; "
            "allowed: top_k 0 (off) and above, max_completion_length 1 and above"
        )
