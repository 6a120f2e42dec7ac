"""Decoding speed of TorchEngine against transformers, or of Gleaner over vLLM against vLLM alone, and our overhead.

Run: python -m benchmarks.rollout --json. The benchmark uses one thread, interleaves the arms and reports medians. The
model is a random Qwen2 of 3.3 million parameters. Every response has the same prompt length and number of tokens, so
that all arms do equal work. All arms sample at temperature 1; ours and continuous batching also return log-probs, but
`generate` does not.
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from benchmarks.equal_work import PROMPT, decode, journal, probe_model
from benchmarks.reporting import Measured, Target, finish, interleave, medians, ratios
from benchmarks.rollout_vllm import vllm_rows
from tasks.sampling.engines.batch import Batch
from tasks.sampling.engines.engine import GenerationRequest, TokenDelta
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.weight_tensors import as_block

SAMPLING_RESPONSES = 32
LARGE_VOCABULARY = 32_768


class MultinomialEngine(TorchEngine):
    """The same loop with the sampling of an engine without keyed noise: one torch.multinomial, and the log-probs."""

    def _draw(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits.float() / batch.temperature.unsqueeze(1), dim=-1)
        token_ids = torch.multinomial(logprobs.exp(), 1)
        return token_ids.squeeze(1), logprobs.gather(1, token_ids).squeeze(1)


def engine_for(
    model: Any, max_responses_in_flight: int, context_length: int, kind: type[TorchEngine] = TorchEngine
) -> TorchEngine:
    """A float32 CPU engine with the model's weights."""
    with tempfile.TemporaryDirectory() as model_dir:
        model.config.save_pretrained(model_dir)
        engine = kind(
            Path(model_dir),
            dtype="float32",
            device="cpu",
            max_responses_in_flight=max_responses_in_flight,
            context_length=context_length,
        )
    engine.load_weights(0, {name: as_block(tensor) for name, tensor in model.named_parameters()})
    return engine


def generate(model: Any, responses: int, tokens: int) -> float:
    """Tokens per second of transformers' `generate` on one static batch."""
    prompts = torch.tensor([PROMPT] * responses)
    started_s = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        generation_config=_generation_config(tokens),
    )
    return responses * tokens / (time.perf_counter() - started_s)


def continuous_batching(model: Any, responses: int, tokens: int) -> float:
    """Tokens per second of transformers' continuous batching with log-probs; its manager is kept between calls."""
    started_s = time.perf_counter()
    outputs = model.generate_batch(
        [list(PROMPT)] * responses,
        generation_config=_generation_config(tokens),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32,
            num_blocks=1200,
            max_batch_tokens=1024,
            return_logprobs=True,
            seed=0,
            use_cuda_graph=False,
            use_async_batching=False,
        ),
        persistent_manager=True,
    )
    generated = sum(len(output.generated_tokens) for output in outputs.values())
    return generated / (time.perf_counter() - started_s)


def speed_rows(sizes: Sequence[tuple[int, int, int]]) -> tuple[list[dict[str, Any]], list[Measured]]:
    """Table rows for (responses, tokens each, rounds), and the ratio to continuous batching of each."""
    model, paged = probe_model(512), probe_model(512)
    paged.set_attn_implementation("paged|eager")  # its faster choice on a CPU at 32 responses
    rows, faster = [], []
    for responses, tokens, rounds in sizes:
        engine = engine_for(model, responses, len(PROMPT) + tokens)
        arms: dict[str, Callable[[], float]] = {
            "engine": lambda engine=engine, n=responses, k=tokens: decode(engine, n, k),  # type: ignore[misc]
            "generate": lambda n=responses, k=tokens: generate(model, n, k),  # type: ignore[misc]
            "continuous": lambda n=responses, k=tokens: continuous_batching(paged, n, k),  # type: ignore[misc]
        }
        arms["engine"]()
        continuous_batching(paged, responses, 2)
        rates = interleave(arms, rounds)
        found = medians(rates)
        faster.append(ratios(rates["engine"], rates["continuous"]))
        paged.destroy_cached_continuous_batching_manager()
        rows.append(
            {
                "measure": f"{responses} responses, tokens/s",
                "ours": found["engine"],
                "generate": found["generate"],
                "continuous batching": found["continuous"],
                "ratio": faster[-1].median,
            }
        )
    return rows, faster


def sampling_tax_row(vocab_size: int, tokens: int, rounds: int) -> tuple[dict[str, Any], Measured]:
    """The extra time per token, in per cent, of keyed sampling over torch.multinomial in the same loop."""
    model, context_length = probe_model(vocab_size), len(PROMPT) + tokens
    engines = {
        "keyed": engine_for(model, SAMPLING_RESPONSES, context_length),
        "multinomial": engine_for(model, SAMPLING_RESPONSES, context_length, MultinomialEngine),
    }
    arms: dict[str, Callable[[], float]] = {
        name: lambda engine=engine: decode(engine, SAMPLING_RESPONSES, tokens)  # type: ignore[misc]
        for name, engine in engines.items()
    }
    interleave(arms, 1)
    rates = interleave(arms, rounds)
    found, tax = medians(rates), ratios(rates["multinomial"], rates["keyed"]).scaled(in_per_cent)
    row = {
        "measure": f"vocabulary {vocab_size}, tokens/s",
        "ours": found["keyed"],
        "multinomial": found["multinomial"],
        "keyed sampling tax %": tax.median,
    }
    return row, tax


def in_per_cent(ratio: float) -> float:
    """By how many per cent a ratio exceeds 1."""
    return 100 * (ratio - 1)


class TimedEngine(TorchEngine):
    """Counts the processor seconds of the thread that is in the engine."""

    spent_s = 0.0

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        began_s = time.thread_time()
        super().start(requests)
        self.spent_s += time.thread_time() - began_s

    def step(self) -> list[TokenDelta]:
        began_s = time.thread_time()
        deltas = super().step()
        self.spent_s += time.thread_time() - began_s
        return deltas


def journalling_tax_row(tokens: int, rounds: int, flush_interval_s: float) -> tuple[dict[str, Any], Measured]:
    """The processor time of all that is not the engine, in per cent of the engine's, in sessions that journal.

    Both come from the same session. To compare sessions with bare loops of the same engine would measure a per cent as
    the difference of two times that scatter by more. The flush thread's work counts, although the thread may have a
    core of its own.
    """
    engine = engine_for(probe_model(512), SAMPLING_RESPONSES, len(PROMPT) + tokens, TimedEngine)
    assert isinstance(engine, TimedEngine)
    beside, inside = [], []
    for _ in range(1 + rounds):
        engine.spent_s = 0.0
        rate = journal(engine, SAMPLING_RESPONSES, tokens, flush_interval_s, time.process_time)
        beside.append(SAMPLING_RESPONSES * tokens / rate - engine.spent_s)
        inside.append(engine.spent_s)
    # A process's first shard costs 0.2 s of imports.
    tax = ratios(beside[1:], inside[1:]).scaled(lambda share: 100 * share)
    row = {
        "measure": f"journal every {flush_interval_s:g} s",
        "journalling microseconds per step": 1e6 * statistics.median(beside[1:]) / tokens,
        "engine microseconds per step": 1e6 * statistics.median(inside[1:]) / tokens,
        "journalling tax %": tax.median,
    }
    return row, tax


def _generation_config(tokens: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--full", action="store_true", help="128 tokens per response and more rounds: some minutes")
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    if options.engine == "vllm":
        rows, targets = vllm_rows(full=options.full)
        finish("rollout_vllm", rows, targets, as_json=options.json, notes={})
    else:
        report_torch(full=options.full, as_json=options.json)


def report_torch(*, full: bool, as_json: bool) -> None:
    """Measure and report everything about our own engine."""
    # A target needs at least 6 rounds, because its whole interval has to keep the bound.
    sizes = [(1, 128, 9), (32, 128, 15), (128, 128, 5)] if full else [(1, 48, 3), (32, 64, 9), (128, 16, 3)]
    speed, faster = speed_rows(sizes)
    small, small_tax = sampling_tax_row(512, 128 if full else 48, 25 if full else 11)
    large, large_tax = sampling_tax_row(LARGE_VOCABULARY, 64 if full else 16, 15 if full else 7)
    journalled, tax = journalling_tax_row(400, 25 if full else 9, 2.0)
    targets: list[Target] = [
        faster[1].target("torch_engine_over_continuous_batching_32", ">= 4"),
        small_tax.target("keyed_sampling_tax_percent_512", "< 3"),
        large_tax.target("keyed_sampling_tax_percent_32768", "< 3"),
        tax.target("journalling_tax_percent_at_2_s", "< 1"),
    ]
    rows = [*speed, small, large, journalled]
    finish("rollout", rows, targets, as_json=as_json, notes={"responses_tokens_rounds": sizes})


if __name__ == "__main__":
    main()
