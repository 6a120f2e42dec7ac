"""Our whole rollout path over vLLM (session, journal, keyed sampling) against vLLM alone on the same prompts.

Both arms have the same model, cache and limits. vLLM alone is its `LLM.generate` with its own sampler and log-probs,
which returns everything at the end. Two arms in between are our engine without a session, and also without keyed
sampling.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from benchmarks.equal_work import PROMPT, decode, journal, probe_model
from benchmarks.reporting import Target, interleave, ratios
from tasks.configuration.rollout import SpeculationConfig, VllmConfig
from tasks.sampling.engines.engine import Engine
from tasks.sampling.engines.vllm_engine import VllmEngine
from tasks.sampling.engines.vllm_names import resolve
from tasks.sampling.engines.vllm_settings import build_vllm_config, prepare_environment
from tasks.sampling.engines.weight_tensors import as_block

FLUSH_INTERVAL_S = 2.0
Process = Literal["own", "same"]


class BareVllm:
    """vLLM's own interface for this work: all prompts in, all responses out."""

    def __init__(self, model_dir: Path, responses: int, context_length: int, process: Process) -> None:
        config = VllmConfig(process=process)
        device = prepare_environment(config)
        settings = build_vllm_config(
            config,
            SpeculationConfig(),
            model_dir,
            dtype="float32",
            max_responses_in_flight=responses,
            context_length=context_length,
            architecture="Qwen2ForCausalLM",
            on_cpu=device == "cpu",
            keyed=False,
        )
        self._engine = resolve("LLMEngine").from_vllm_config(settings, disable_log_stats=True)

    def decode(self, responses: int, tokens: int) -> float:
        """Tokens per second, prefill included."""
        params = resolve("SamplingParams")(
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=resolve("RequestOutputKind").FINAL_ONLY,
        )
        prompt, generated = resolve("tokens_input"), 0
        started_s = time.perf_counter()
        for index in range(responses):
            self._engine.add_request(str(index), prompt(list(PROMPT)), params)
        while self._engine.has_unfinished_requests():
            generated += sum(len(output.outputs[0].token_ids) for output in self._engine.step())
        return generated / (time.perf_counter() - started_s)

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def vllm_row(process: Process, responses: int, tokens: int, rounds: int, *, parts: bool) -> dict[str, Any]:
    """Tokens per second of the arms, interleaved in one run, and each arm's ratio to vLLM alone, round by round.

    parts: also measure our engine without a session, and without keyed sampling.
    """
    with ExitStack() as stack:
        model = probe_model(512)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model.config.save_pretrained(folder)

        def engine(*, keyed: bool) -> Engine:
            built = VllmEngine(
                folder,
                vocab_size=512,
                dtype="float32",
                max_responses_in_flight=responses,
                context_length=len(PROMPT) + tokens,
                config=VllmConfig(process=process),
                keyed=keyed,
            )
            stack.callback(built.close)
            built.load_weights(0, {name: as_block(tensor) for name, tensor in model.named_parameters()})
            return built

        bare = BareVllm(folder, responses, len(PROMPT) + tokens, process)
        stack.callback(bare.close)
        keyed = engine(keyed=True)
        arms: dict[str, Callable[[], float]] = {
            "bare": lambda: bare.decode(responses, tokens),
            "session": lambda: journal(keyed, responses, tokens, FLUSH_INTERVAL_S),
        }
        if parts:
            unkeyed = engine(keyed=False)
            arms["engine"] = lambda: decode(keyed, responses, tokens)
            arms["unkeyed"] = lambda: decode(unkeyed, responses, tokens)
        interleave(arms, 1)
        found = interleave(arms, rounds)
    row = {
        "measure": f"vLLM in {'its own' if process == 'own' else 'this'} process, {responses} responses, tokens/s",
        "vLLM alone": statistics.median(found["bare"]),
        "our rollout": statistics.median(found["session"]),
        "ratio": ratios(found["session"], found["bare"]),
    }
    if parts:
        row |= {
            "engine ratio": ratios(found["engine"], found["bare"]),
            "unkeyed ratio": ratios(found["unkeyed"], found["bare"]),
            "keyed sampling tax %": ratios(found["unkeyed"], found["engine"]).scaled(percent),
            "journalling tax %": ratios(found["engine"], found["session"]).scaled(percent),
        }
    return row


def percent(ratio: float) -> float:
    """How much more than 1 a ratio is, in percent."""
    return 100 * (ratio - 1)


def vllm_rows(*, full: bool) -> tuple[list[dict[str, Any]], list[Target]]:
    """The rows and targets of `--engine vllm`."""
    responses, tokens, rounds = (32, 900, 7) if full else (32, 400, 5)
    processes: list[Process] = ["own", "same"] if full else ["own"]
    rows = [vllm_row(process, responses, tokens, rounds, parts=full) for process in processes]
    targets = [
        row["ratio"].target(f"vllm_rollout_over_bare_vllm_in_{process}_process", ">= 0.95")
        for process, row in zip(processes, rows, strict=True)
    ]
    return rows, targets
