"""What it saves that vLLM hands out a response's tokens some at a time (its `stream_interval`); they stay the same.

Our engine decodes equal responses with each interval, in one vLLM, which runs in a process of its own. Processor time
is that of our process, which receives the tokens: that is the share that bounds small models on a fast GPU.
`python -m benchmarks.gpu --part frontend` compares intervals in the same way on a GPU.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.equal_work import PROMPT, probe_model
from benchmarks.reporting import Target, finish, interleave, ratios
from storage.noise_keys import noise_key
from storage.records import SamplingParams
from tasks.sampling.engines.engine import Engine, GenerationRequest
from tasks.sampling.engines.vllm_engine import VllmEngine
from tasks.sampling.engines.weight_tensors import as_block

INTERVALS = (1, 4, 16)
VOCABULARY = 512


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


def measure(responses: int, tokens: int, rounds: int) -> tuple[list[dict[str, Any]], list[Target]]:
    """A row for each interval, and whether all responses are the same."""
    with tempfile.TemporaryDirectory() as folder:
        model = probe_model(VOCABULARY)
        model.config.save_pretrained(folder)
        engine = Streaming(
            Path(folder),
            vocab_size=VOCABULARY,
            dtype="float32",
            max_responses_in_flight=responses,
            context_length=len(PROMPT) + tokens,
        )
        engine.load_weights(0, {name: as_block(tensor) for name, tensor in model.named_parameters()})
        found = compared(engine, INTERVALS, responses, tokens, rounds)
        engine.close()
    cpu = {interval: [one.cpu_us_per_token for one in those] for interval, those in found.items()}
    taken = {interval: [one.us_per_token for one in those] for interval, those in found.items()}
    rows = [
        {
            "measure": f"{responses} responses of {tokens} tokens, every {interval}",
            "processor time over every 1": ratios(cpu[interval], cpu[1]),
            "time over every 1": ratios(taken[interval], taken[1]),
        }
        for interval in INTERVALS
    ]
    same = sum(found[interval][-1].token_ids == found[1][-1].token_ids for interval in INTERVALS)
    return rows, [Target("intervals_with_the_same_tokens", float(same), f">= {len(INTERVALS)}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--responses", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    rows, targets = measure(asked.responses, asked.tokens, asked.rounds)
    finish("stream_interval", rows, targets, as_json=asked.json)


if __name__ == "__main__":
    main()
