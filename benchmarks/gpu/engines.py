"""Decode speed of our engines against bare vLLM on one device, and the cost of keyed sampling and journalling.

All engines decode the same prompts to the same lengths at temperature 1 and return log-probs. If the device's memory
allows, they exist side by side and take turns; otherwise they run one after another. The result says which.
"""

import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.equal_work import PROMPT, decode, journal
from benchmarks.gpu.model import write_model
from benchmarks.gpu.sizes import Size
from benchmarks.reporting import interleave, medians
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import VllmConfig
from tasks.learning.pretrained import read_tensors
from tasks.sampling.engines.torch_engine import TorchEngine

KEYED = "vllm_keyed"
CONTESTANTS = 4  # TorchEngine included, which takes what it needs of its share
# The share of a GPU's memory that all engines take together; the rest is for computing.
_MEMORY_SHARE = 0.85
_WORKING_BYTES = 4 << 30
_CPU_CACHE_BYTES = 64 << 20
# Bare vLLM reads these too. On a CPU they make it possible to run several engines on few cores.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled by nvcc, which our image lacks
}
_CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class Contestant:
    """A contestant: `run` decodes and returns tokens per second; `engine` is its engine if it is one of ours."""

    run: Callable[[], float]
    close: Callable[[], object]
    engine: Any = None


@dataclass(frozen=True)
class Field:
    """The common settings of all contestants. `memory_share`: the share of a GPU's memory for one vLLM engine."""

    size: Size
    model: Path
    blocks: Mapping[str, TensorBlock]
    memory_share: float

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        return "bfloat16" if self.size.device == "cuda" else "float32"

    @property
    def context_length(self) -> int:
        return context_length(self.size)

    def with_vllm(
        self, *, keyed: bool = True, batch_invariant: bool = False, process: Literal["own", "same"] = "own"
    ) -> Contestant:
        """Our engine over vLLM; not keyed, vLLM's own noise draws its tokens."""
        from tasks.sampling.engines.vllm_engine import VllmEngine  # noqa: PLC0415 - vLLM reads the environment when imported

        engine = VllmEngine(
            self.model,
            vocab_size=self.size.shape.vocab_size,
            dtype=self.dtype,
            max_responses_in_flight=self.size.responses,
            context_length=self.context_length,
            config=VllmConfig(
                process=process,
                batch_invariant=batch_invariant,
                gpu_memory_utilization=self.memory_share,
                kv_cache_memory_bytes=None if self.size.device == "cuda" else _CPU_CACHE_BYTES,
                enforce_eager=self.size.small,
            ),
            keyed=keyed,
        )
        return self._ours(engine)

    def with_torch(self) -> Contestant:
        """Our own engine."""
        engine = TorchEngine(
            self.model,
            dtype=self.dtype,
            device="cuda" if self.size.device == "cuda" else "cpu",
            max_responses_in_flight=self.size.responses,
            context_length=self.context_length,
        )
        return self._ours(engine)

    def bare_vllm(self) -> Contestant:
        """The `LLM.generate` of vLLM, without anything of ours."""
        vllm = importlib.import_module("vllm")  # now, because it reads the environment when imported
        llm = vllm.LLM(
            model=str(self.model),
            skip_tokenizer_init=True,
            dtype=self.dtype,
            max_num_seqs=self.size.responses,
            max_model_len=self.context_length,
            gpu_memory_utilization=self.memory_share,
            kv_cache_memory_bytes=None if self.size.device == "cuda" else _CPU_CACHE_BYTES,
            enforce_eager=self.size.small,
        )
        params = vllm.SamplingParams(
            temperature=1.0, logprobs=0, max_tokens=self.size.tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": list(PROMPT)} for _ in range(self.size.responses)]

        def run() -> float:
            began_s = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            return tokens / (time.perf_counter() - began_s)

        return Contestant(run, llm.llm_engine.engine_core.shutdown)

    def _ours(self, engine: Any) -> Contestant:
        try:
            engine.load_weights(0, self.blocks)
        except BaseException:
            engine.close()
            raise
        return Contestant(partial(decode, engine, self.size.responses, self.size.tokens), engine.close, engine)

    def contestants(self) -> dict[str, Callable[[], Contestant]]:
        """Builders by name; none uses batch-invariant kernels, because those are set for a whole process."""
        return {
            "vllm_bare": self.bare_vllm,
            KEYED: self.with_vllm,
            "vllm_unkeyed": partial(self.with_vllm, keyed=False),
            "torch": self.with_torch,
        }


def measure(size: Size) -> dict[str, Any]:
    """The tokens per second of every contestant, the journalling tax, and the reason for each missing contestant."""
    share, together = memory_plan(size)
    return {"together": together} | _measure_field(size, share, Field.contestants, together=together)


def measure_plain(size: Size) -> dict[str, Any]:
    """Tokens per second of vLLM alone on the device, with its usual kernels."""
    return _measure_alone(size, "plain", batch_invariant=False)


def measure_invariant(size: Size) -> dict[str, Any]:
    """The same with its batch-invariant kernels, which are set for a whole process."""
    return _measure_alone(size, "invariant", batch_invariant=True)


def _measure_alone(size: Size, name: str, *, batch_invariant: bool) -> dict[str, Any]:
    def contestants(field: Field) -> dict[str, Callable[[], Contestant]]:
        # A CPU is shared with other work, and the start of further processes takes minutes there.
        process: Literal["own", "same"] = "own" if size.device == "cuda" else "same"
        return {name: partial(field.with_vllm, batch_invariant=batch_invariant, process=process)}

    return _measure_field(size, _MEMORY_SHARE, contestants, together=True)


def prepare_bare_environment(size: Size) -> None:
    """Set what vLLM reads from the environment when it is imported."""
    os.environ.update(_ENVIRONMENT | ({} if size.device == "cuda" else _CPU_ENVIRONMENT))


def _measure_field(
    size: Size,
    share: float,
    contestants: Callable[[Field], Mapping[str, Callable[[], Contestant]]],
    *,
    together: bool,
) -> dict[str, Any]:
    prepare_bare_environment(size)
    found: dict[str, Any] = {"responses": size.responses, "tokens": size.tokens, "skipped": {}, "rates": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_model(size.shape, Path(folder), size.device)
        builders = contestants(Field(size, Path(folder), read_tensors(Path(folder)), share))
        for crew in [builders] if together else [{name: builder} for name, builder in builders.items()]:
            _measure_crew(size, crew, found)
    if not found["rates"]:
        raise RuntimeError(f"no engine could be measured: {found['skipped']}")
    return found | {"tokens_per_s": {name: statistics.median(rates) for name, rates in found["rates"].items()}}


def context_length(size: Size) -> int:
    """The most tokens of prompt and response."""
    return len(PROMPT) + max(size.tokens, *size.journal_tokens)


def memory_plan(size: Size) -> tuple[float, bool]:
    """The share of the GPU's memory for one vLLM engine, and whether all of them fit beside each other."""
    if size.device != "cuda":
        return _MEMORY_SHARE, True
    shape = size.shape
    cache_bytes_per_token = 2 * 2 * shape.layers * shape.key_value_heads * shape.head_width
    cache_bytes = size.responses * context_length(size) * cache_bytes_per_token
    one_bytes = 2 * shape.weights + cache_bytes + _WORKING_BYTES
    _, total_bytes = torch.cuda.mem_get_info()
    together = CONTESTANTS * one_bytes <= _MEMORY_SHARE * total_bytes
    return _MEMORY_SHARE / CONTESTANTS if together else _MEMORY_SHARE, together


def _measure_crew(size: Size, builders: Mapping[str, Callable[[], Contestant]], found: dict[str, Any]) -> None:
    """Build these contestants, let them take turns, add their results to `found`, and close them."""
    with ExitStack() as closing:
        crew = {}
        for name, builder in builders.items():
            try:
                crew[name] = builder()
            except Exception as error:  # noqa: BLE001 - if one cannot start, the others are still measured
                found["skipped"][name] = reason(error)
                continue
            closing.callback(crew[name].close)
        if crew:
            arms = {name: one.run for name, one in crew.items()}
            interleave(arms, 1)
            found["rates"] |= interleave(arms, size.engine_rounds)
        if KEYED in crew:
            found.update(journalling(crew[KEYED].engine, size))


def journalling(engine: Any, size: Size) -> dict[str, float]:
    """The wall-clock cost of a journalling session over the bare loop.

    The difference between runs with many and few tokens gives the extra time per token in per cent. The rest is the
    fixed time in which a session begins and ends, which would hide the extra time in a run of seconds.
    """
    durations: dict[str, Callable[[], float]] = {}
    for tokens in size.journal_tokens:
        durations[f"bare {tokens}"] = partial(_duration, partial(decode, engine), size.responses, tokens)
        session = partial(journal, engine, flush_interval_s=size.flush_interval_s)
        durations[f"journalled {tokens}"] = partial(_duration, session, size.responses, tokens)
    interleave(durations, 1)
    return journalling_costs(medians(interleave(durations, size.engine_rounds)), size)


def journalling_costs(durations_s: Mapping[str, float], size: Size) -> dict[str, float]:
    """The figures of `journalling`, from the seconds of "bare" and "journalled" runs of few and of many tokens."""
    few, many = size.journal_tokens
    per_token_s = {
        arm: (durations_s[f"{arm} {many}"] - durations_s[f"{arm} {few}"]) / (many - few)
        for arm in ("bare", "journalled")
    }
    extra_s = durations_s[f"journalled {many}"] - durations_s[f"bare {many}"]
    return {
        "flush_interval_s": size.flush_interval_s,
        "journalled_tokens_per_s": size.responses / per_token_s["journalled"],
        "journalling_tax_percent": 100 * (per_token_s["journalled"] / per_token_s["bare"] - 1),
        "session_seconds": extra_s - many * (per_token_s["journalled"] - per_token_s["bare"]),
    }


def _duration(rate: Callable[[int, int], float], responses: int, tokens: int) -> float:
    return responses * tokens / rate(responses, tokens)


def reason(error: BaseException) -> str:
    """The error in one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"
