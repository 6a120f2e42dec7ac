"""Does the process that receives all tokens bound a small model, and what does vLLM's `stream_interval` save there?"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from benchmarks.equal_work import PROMPT
from benchmarks.gpu.engine_arm import prepare_bare_environment
from benchmarks.gpu.model import write_model
from benchmarks.gpu.sizes import Size
from benchmarks.reporting import ratios
from benchmarks.stream_interval import Decoded, Streaming, compared
from tasks.configuration.rollout import VllmConfig
from tasks.learning.pretrained import read_tensors

_INTERVALS = (1, 4)
_CPU_CACHE_BYTES = 64 << 20


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
