"""Does the process that receives all tokens bound a small model, and what does vLLM's `stream_interval` save there?

Our engine decodes equal responses with each interval, in one vLLM, which runs in a process of its own. Processor time
is that of our process, which receives the tokens: that is the share that bounds small models on a fast GPU.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.equal_work import PROMPT
from benchmarks.gpu.engine_arm import prepare_bare_environment
from benchmarks.gpu.model import write_model
from benchmarks.gpu.sizes import Size
from benchmarks.reporting import interleave, ratios
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from tasks.configuration.rollout import VllmConfig
from tasks.learning.pretrained import read_tensors
from tasks.sampling.engines.engine import Engine, GenerationRequest
from tasks.sampling.engines.vllm_engine import VllmEngine

_INTERVALS = (1, 4)
_CPU_CACHE_BYTES = 64 << 20


class Streaming(VllmEngine):
    """Our engine with requests of a given interval."""

    interval = 1

    def _params(self, request: GenerationRequest) -> Any:
        params = super()._params(request)
        params.stream_interval = self.interval
        return params


@dataclass(frozen=True, slots=True)
class Decoded:
    """One decoding: microseconds per token, of time and of our process's processor time, and what was handed out.

    deltas: how often a response got tokens, over all responses. token_ids: response -> its tokens.
    """

    us_per_token: float
    cpu_us_per_token: float
    deltas: int
    token_ids: dict[int, tuple[int, ...]]


def decoded(engine: Engine, responses: int, tokens: int) -> Decoded:
    """Decode `responses` responses of `tokens` tokens."""
    sampling = SamplingParams(max_completion_length=tokens)
    found: dict[int, tuple[int, ...]] = dict.fromkeys(range(responses), ())
    count = 0
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    engine.start([GenerationRequest(i, i, PROMPT, (), noise_key(0, 0, i), sampling) for i in found])
    while deltas := engine.step():
        count += len(deltas)
        for delta in deltas:
            found[delta.response] += delta.token_ids
    each = 1e6 / (responses * tokens)
    took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return Decoded(took_s * each, took_cpu_s * each, count, found)


def compared(
    engine: Streaming, intervals: Sequence[int], responses: int, tokens: int, rounds: int
) -> dict[int, list[Decoded]]:
    """The decodings with each interval, which take turns; a first one of each does not count."""
    found: dict[int, list[Decoded]] = {interval: [] for interval in intervals}

    def arm(interval: int) -> Callable[[], float]:
        def once() -> float:
            engine.interval = interval
            found[interval].append(decoded(engine, responses, tokens))
            return found[interval][-1].cpu_us_per_token

        return once

    interleave({str(interval): arm(interval) for interval in intervals}, 1)
    for each in found.values():
        each.clear()
    interleave({str(interval): arm(interval) for interval in intervals}, rounds)
    return found


def measure(size: Size) -> dict[str, Any]:
    """The figures of each interval, in one vLLM in processes of its own, as a member has it."""
    prepare_bare_environment(size.device)
    with tempfile.TemporaryDirectory() as folder:
        write_model(size.shape, Path(folder), size.device)
        dtype: Literal["float32", "bfloat16"] = "bfloat16" if size.device == "cuda" else "float32"
        engine = Streaming(
            Path(folder),
            vocab_size=size.shape.vocab_size,
            dtype=dtype,
            max_responses_in_flight=size.responses,
            context_length=len(PROMPT) + size.frontend_tokens,
            config=VllmConfig(
                process="own",
                batch_invariant=False,
                kv_cache_memory_bytes=None if size.device == "cuda" else _CPU_CACHE_BYTES,
                enforce_eager=size.small,
            ),
        )
        try:
            engine.load_weights(0, read_tensors(Path(folder)))
            found = compared(engine, _INTERVALS, size.responses, size.frontend_tokens, size.frontend_rounds)
        finally:
            engine.close()
    return {"responses": size.responses, "tokens": size.frontend_tokens, "arms": arms(found)}


def arms(found: Mapping[int, Sequence[Decoded]]) -> list[dict[str, Any]]:
    """An entry for each interval; medians of its decodings, and ratios to the first interval.

    busy: processor seconds of the receiving process per second; near 1 it bounds the rate, because its Python code runs
    on one thread at a time. tokens_per_delta: at least about the interval, or vLLM ignores it. same_tokens: the share
    of responses with the tokens of the first interval.
    """
    first = next(iter(found.values()))
    entries = []
    for interval, those in found.items():
        tokens = sum(map(len, those[-1].token_ids.values()))
        expected = first[-1].token_ids
        entries.append(
            {
                "interval": interval,
                "tokens_per_s": 1e6 / statistics.median(one.us_per_token for one in those),
                "cpu_us_per_token": statistics.median(one.cpu_us_per_token for one in those),
                "busy": statistics.median(one.cpu_us_per_token / one.us_per_token for one in those),
                "tokens_per_delta": tokens / those[-1].deltas,
                "time_over_first": _ratios(those, first, "us_per_token"),
                "cpu_over_first": _ratios(those, first, "cpu_us_per_token"),
                "same_tokens": statistics.mean(those[-1].token_ids[one] == expected[one] for one in expected),
            }
        )
    return entries


def _ratios(those: Sequence[Decoded], first: Sequence[Decoded], figure: str) -> dict[str, Any]:
    return asdict(ratios([getattr(one, figure) for one in those], [getattr(one, figure) for one in first]))
