"""An engine in a process of its own: bare vLLM, ours over it, or the torch engine.

It answers when its first token is there, and then each line of input: {"responses", "tokens"} with tokens per second,
{"journal": true} with what a journal costs. It ends with its input.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.arm import IMPORTED, STARTED
from benchmarks.gpu.sizes import ModelShape, Size, size_for
from benchmarks.trainer_work import answer, keep_answers_apart

Kind = Literal["bare", "ours", "unkeyed", "invariant", "torch"]
PROMPT_TOKENS = 16
# Bare vLLM reads these too. On a CPU they make it possible to run several engines on few cores.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled by nvcc, which our image lacks
}
_CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True, kw_only=True)
class EngineWork:
    """What an engine's process gets.

    folder: the model. shape: its shape. responses, context_length: as the engine's settings. memory_share,
    cache_bytes: a share of the GPU's memory and the bytes of the key-value cache. They are given, so that vLLM does not
    measure them: that fails when another process gives memory back meanwhile. caches: the folder of compiled code.
    """

    kind: Kind
    folder: str
    shape: ModelShape
    device: str
    small: bool
    responses: int
    context_length: int
    memory_share: float
    cache_bytes: int
    caches: str

    @property
    def size(self) -> Size:
        return size_for(self.device, "0.5b", small=self.small)

    def as_argument(self) -> dict[str, Any]:
        return asdict(self)


def work_of_arguments() -> EngineWork:
    """The work from this process's argument."""
    given = json.loads(sys.argv[1])
    return EngineWork(**{**given, "shape": ModelShape(**given["shape"])})


def prepare_bare_environment(device: str) -> None:
    """Set what vLLM reads from the environment when it is imported."""
    os.environ.update(_ENVIRONMENT | ({} if device == "cuda" else _CPU_ENVIRONMENT))


def main() -> None:
    """Start the engine, answer, and do what each line asks for."""
    keep_answers_apart()
    work, began_s = work_of_arguments(), time.perf_counter()
    prepare_bare_environment(work.device)
    if work.kind != "torch":
        importlib.import_module("vllm")
        print(IMPORTED, file=sys.stderr, flush=True)
    engine: Any = _Bare(work) if work.kind == "bare" else _ours(work)
    started_s = time.perf_counter()
    print(STARTED, file=sys.stderr, flush=True)
    with closing(engine):
        if work.kind != "bare":
            from tasks.learning.pretrained import read_tensors  # noqa: PLC0415 - imports torch

            engine.load_weights(0, read_tensors(Path(work.folder)))
        loaded_s = time.perf_counter()
        _rate(engine, 8, 1)
        ended_s = time.perf_counter()
        answer({"start_s": started_s - began_s, "load_s": loaded_s - started_s, "first_token_s": ended_s - loaded_s})
        for line in sys.stdin:
            asked = json.loads(line)
            if "journal" in asked:
                answer(_journalling(engine, work.size))
            else:
                answer({"tokens_per_s": _rate(engine, asked["responses"], asked["tokens"])})


def _rate(engine: Any, responses: int, tokens: int) -> float:
    if isinstance(engine, _Bare):
        return engine.rate(responses, tokens)
    from benchmarks.equal_work import decode  # noqa: PLC0415 - imports torch

    return decode(engine, responses, tokens)


def _dtype(work: EngineWork) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if work.device == "cuda" else "float32"


class _Bare:
    """The `LLM.generate` of vLLM, without anything of ours, with random weights."""

    def __init__(self, work: EngineWork) -> None:
        from tasks.sampling.engines.vllm_settings import CACHES  # noqa: PLC0415 - imports torch

        os.environ |= {name: str(Path(work.caches) / part) for name, part in CACHES.items()}
        self._vllm = importlib.import_module("vllm")
        self._llm = self._vllm.LLM(
            model=work.folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=_dtype(work),
            max_num_seqs=work.responses,
            max_model_len=work.context_length,
            gpu_memory_utilization=work.memory_share,
            kv_cache_memory_bytes=work.cache_bytes,
            enforce_eager=work.small,
        )

    def rate(self, responses: int, tokens: int) -> float:
        """Tokens per second of `responses` responses of `tokens` tokens."""
        params = self._vllm.SamplingParams(
            temperature=1.0, logprobs=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": list(range(3, 3 + PROMPT_TOKENS))} for _ in range(responses)]
        began_s = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        return made / (time.perf_counter() - began_s)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _ours(work: EngineWork) -> Any:
    if work.kind == "torch":
        from tasks.sampling.engines.torch_engine import TorchEngine  # noqa: PLC0415 - imports torch

        return TorchEngine(
            work.folder,
            dtype=_dtype(work),
            device="cuda" if work.device == "cuda" else "cpu",
            max_responses_in_flight=work.responses,
            context_length=work.context_length,
        )
    from tasks.configuration.rollout import VllmConfig  # noqa: PLC0415 - vLLM reads the environment when imported
    from tasks.sampling.engines.vllm_engine import VllmEngine  # noqa: PLC0415

    return VllmEngine(
        work.folder,
        vocab_size=work.shape.vocab_size,
        dtype=_dtype(work),
        max_responses_in_flight=work.responses,
        context_length=work.context_length,
        config=VllmConfig(
            # A CPU is shared with other work, and the start of further processes takes minutes there.
            process="own" if work.device == "cuda" else "same",
            batch_invariant=work.kind == "invariant",
            gpu_memory_utilization=work.memory_share,
            kv_cache_memory_bytes=work.cache_bytes,
            enforce_eager=work.small,
            cache_dir=work.caches,
        ),
        keyed=work.kind != "unkeyed",
    )


def _journalling(engine: Any, size: Size) -> dict[str, float]:
    """The wall-clock cost of a journalling session over the bare loop.

    The difference between runs with many and few tokens gives the extra time per token in per cent. The rest is the
    fixed time in which a session begins and ends, which would hide the extra time in a run of seconds.
    """
    from benchmarks.equal_work import decode, journal  # noqa: PLC0415 - imports torch
    from benchmarks.reporting import interleave, medians  # noqa: PLC0415

    durations: dict[str, Callable[[], float]] = {}
    for tokens in size.journal_tokens:
        durations[f"bare {tokens}"] = partial(_duration, partial(decode, engine), size.responses, tokens)
        session = partial(journal, engine, flush_interval_s=size.flush_interval_s)
        durations[f"journalled {tokens}"] = partial(_duration, session, size.responses, tokens)
    interleave(durations, 1)
    return journalling_costs(medians(interleave(durations, size.engine_rounds)), size)


def journalling_costs(durations_s: dict[str, float], size: Size) -> dict[str, float]:
    """The figures of a journal, from the seconds of "bare" and "journalled" runs of few and of many tokens."""
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


if __name__ == "__main__":
    main()
