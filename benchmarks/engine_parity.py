"""Agreement of engines: vLLM, TorchEngine and a plain Hugging Face forward pass, with interruptions and turns.

Run: python -m benchmarks.engine_parity --json; it needs vLLM. 28 groups of 8 responses with mixed sampling are decoded
on a small random model: by each engine alone; by each with every response interrupted at random tokens and resumed
among others; with responses that change engines half-way; with new weights; and, with --full, while vLLM's process is
killed. All but the last two are done with turns, too: a tool answers each turn, and cuts fall inside its observations
as well. With keyed noise, all draw the same tokens as long as their logits agree. This is required in float32 on a CPU.
On a GPU it is required of an engine that says it is batch-invariant, against itself, and only reported otherwise.
"""

import argparse
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from benchmarks.parity_work import (
    Decoding,
    ForwardPass,
    Size,
    Tool,
    compare,
    echo_tool,
    random_cuts,
    random_model,
    requests_for,
    stop_tokens,
    weight_versions,
)
from benchmarks.reporting import Target, finish
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.decoder import model_config
from tasks.sampling.engines.engine import Engine, EngineDied, EngineError, GenerationRequest
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.vllm_engine import VllmEngine
from tasks.sampling.engines.vllm_names import installed_version

DEFAULT = Size(groups=28, tokens=96, in_flight=32)
SMALL = Size(groups=2, tokens=24, in_flight=8)
TORCH, VLLM = "torch", "vllm"
NEW_WEIGHTS = ", new weights"
TURNS = ", turns"
Dtype = Literal["float32", "bfloat16", "float16"]
# The share for vLLM; TorchEngine and the Hugging Face model take what they need.
_GPU_MEMORY_SHARE = 0.4
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


@dataclass(frozen=True)
class Arm:
    """One way to decode all responses.

    Attributes:
        against: the arm whose answers it should equal; "" for the first.
        engines: the names of the engines that took part.
        inside_observations: how many of its cuts lie inside an observation.
        prefill_over_naive: the prompt and prefix tokens that they computed, over those they were given.
    """

    name: str
    against: str
    version: int
    engines: tuple[str, ...]
    decoding: Decoding
    prefill_over_naive: float
    inside_observations: int


class Parity:
    """Two engines and the responses that they have decoded so far."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        requests: Sequence[GenerationRequest],
        weights: Sequence[Mapping[str, TensorBlock]],
        tool: Tool,
    ) -> None:
        """engines: the engines by the names TORCH and VLLM. weights: by version. tool: answers turns."""
        self.engines = engines
        self.requests = requests
        self.arms: dict[str, Arm] = {}
        self._weights = weights
        self._tool = tool

    def decode_alive(self) -> None:
        """Run every arm in which no engine dies."""
        on_torch, on_vllm = (partial(_run, engine=self.engines[name]) for name in (TORCH, VLLM))
        self._decode_interrupted(on_torch, on_vllm, "")
        self._decode("torch" + NEW_WEIGHTS, on_torch, TORCH, version=1)
        self._decode("vllm" + NEW_WEIGHTS, on_vllm, VLLM, against="torch" + NEW_WEIGHTS, version=1)
        self._decode_interrupted(on_torch, on_vllm, TURNS)

    def _decode_interrupted(
        self, on_torch: Callable[[Decoding], None], on_vllm: Callable[[Decoding], None], suffix: str
    ) -> None:
        """Run the arms of each engine alone, interrupted, and followed by the other; with turns if `suffix` says so."""
        tool = self._tool if suffix == TURNS else None
        decode, torch_alone = partial(self._decode, tool=tool), "torch" + suffix
        decode(torch_alone, on_torch, TORCH)
        decode("vllm" + suffix, on_vllm, VLLM, against=torch_alone)
        cuts = random_cuts(self.arms[torch_alone].decoding.answers, random.Random(3))
        decode("torch, interrupted" + suffix, on_torch, TORCH, against=torch_alone, cuts=cuts)
        decode("vllm, interrupted" + suffix, on_vllm, VLLM, against="vllm" + suffix, cuts=cuts)
        for first, second in [(TORCH, VLLM), (VLLM, TORCH)]:
            move = partial(_move, first=self.engines[first], second=self.engines[second])
            decode(f"{first}, then {second}{suffix}", move, first, second, against=torch_alone, cuts=cuts)

    def decode_killed(self, kill: Callable[[], None]) -> None:
        """Run the arm in which `kill` kills vLLM after half of all tokens; vLLM is restarted and finishes.

        Raises:
            EngineDied: It also died at another time.
            RuntimeError: It did not die.
        """
        engine, half, deaths = self.engines[VLLM], self.arms["vllm"].decoding.tokens // 2, 0

        def run(decoding: Decoding) -> None:
            nonlocal deaths
            try:
                decoding.run(engine, after_step=lambda: kill() if decoding.tokens >= half else None)
            except EngineDied:
                deaths += 1
                engine.restart()
                engine.load_weights(0, self._weights[0])
                decoding.run(engine)

        self._decode("vllm, killed", run, VLLM, against="vllm")
        if not deaths:
            raise RuntimeError("vllm, killed: the engine finished as if its process were alive")

    def _decode(
        self,
        name: str,
        run: Callable[[Decoding], None],
        *engines: str,
        against: str = "",
        version: int = 0,
        cuts: Mapping[int, Sequence[int]] | None = None,
        tool: Tool | None = None,
    ) -> None:
        """Decode one more arm, which begins with empty caches."""
        for engine in engines:
            self.engines[engine].load_weights(version, self._weights[version])
        before = self._prefill_tokens(engines)
        decoding = Decoding(self.requests, cuts, random.Random(2) if cuts else None, tool)
        run(decoding)
        share = (self._prefill_tokens(engines) - before) / decoding.prefill_naive
        observed = {response: answer.observed for response, answer in decoding.answers.items()}
        inside = sum(
            any(start < at < start + length for start, length in observed[response].items())
            for response, places in (cuts or {}).items()
            for at in places
        )
        self.arms[name] = Arm(name, against, version, engines, decoding, share, inside)

    def _prefill_tokens(self, engines: Sequence[str]) -> int:
        return sum(self.engines[engine].prefill_tokens for engine in engines)


def _run(decoding: Decoding, engine: Engine) -> None:
    decoding.run(engine)


def _move(decoding: Decoding, first: Engine, second: Engine) -> None:
    decoding.run(first, resume=False)
    decoding.run(second)


def rows(
    parity: Parity, model: Any, weights: Sequence[Mapping[str, TensorBlock]], *, exact: bool
) -> list[dict[str, Any]]:
    """One row per arm; `exact`: different engines must agree too."""
    forward_pass, found = ForwardPass(model, weights), []
    for arm in parity.arms.values():
        answers = arm.decoding.answers
        row = {
            "arm": arm.name,
            "against": arm.against,
            "responses": len(answers),
            "interrupted": len(arm.decoding.interrupted),
            "tokens": arm.decoding.tokens,
            "observations": sum(len(answer.observed) for answer in answers.values()),
            "cut inside one": arm.inside_observations,
        }
        if arm.against:
            other = parity.arms[arm.against]
            agreement = compare(answers, other.decoding.answers)
            involved = {*arm.engines, *other.engines}
            faithful = all(parity.engines[engine].batch_invariant for engine in involved)
            row |= {
                "demanded": faithful and (exact or len(involved) == 1),
                "identical": agreement.identical,
                "log-prob difference": agreement.logprob_difference_max,
            }
        plain = forward_pass.agreement(arm.version, parity.requests, answers)
        found.append(
            row
            | {
                "identical to a forward pass": plain.identical,
                "log-prob difference to it": plain.logprob_difference_max,
                "prefill over naive": arm.prefill_over_naive,
            }
        )
    return found


def targets(found: Sequence[Mapping[str, Any]], unchanged: float, *, exact: bool, small: bool) -> list[Target]:
    """The targets. unchanged: the share of responses that new weights did not change; it shows if they were used."""
    demanded = [row for row in found if row.get("demanded")]
    claims = [Target("unchanged_by_new_weights", unchanged, "<= 0.1")]
    if demanded:
        difference = max(row["log-prob difference"] for row in demanded)
        claims += [
            Target("identical_share", min(row["identical"] for row in demanded), ">= 1"),
            Target("logprob_difference_max", difference, "<= 1e-4"),
        ]
    if exact:
        difference = max(row["log-prob difference to it"] for row in found)
        claims += [
            Target("identical_to_forward_pass_share", min(row["identical to a forward pass"] for row in found), ">= 1"),
            Target("logprob_difference_to_forward_pass_max", difference, "<= 1e-4"),
        ]
    if not small:
        interrupted = min(row["interrupted"] for row in found if "interrupted" in row["arm"] or "then" in row["arm"])
        inside = min(row["cut inside one"] for row in found if row["interrupted"] and row["arm"].endswith(TURNS))
        claims += [
            Target("interrupted_responses", interrupted, ">= 200"),
            Target("cuts_inside_observations", inside, ">= 20"),
        ]
    return claims


@contextmanager
def engines_for(
    model_dir: Path, vocab_size: int, size: Size, dtype: Dtype, process: Literal["own", "same"]
) -> Iterator[dict[str, Engine]]:
    """Build both engines, without weights, and close them at the end."""
    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    with ExitStack() as closing:
        of_torch = TorchEngine(
            model_dir,
            dtype=dtype,
            device=device,
            max_responses_in_flight=size.in_flight,
            context_length=size.context_length,
        )
        closing.callback(of_torch.close)
        of_vllm = VllmEngine(
            model_dir,
            vocab_size=vocab_size,
            dtype=dtype,
            device=device,
            max_responses_in_flight=size.in_flight,
            context_length=size.context_length,
            config=VllmConfig(process=process, batch_invariant=True, gpu_memory_utilization=_GPU_MEMORY_SHARE),
        )
        closing.callback(of_vllm.close)
        yield {TORCH: of_torch, VLLM: of_vllm}


def kill_children() -> None:
    """Send SIGKILL to every process that this one started with multiprocessing, which are vLLM's."""
    for child in multiprocessing.active_children():
        child.kill()


def measure(model: Any, model_dir: Path, size: Size, dtype: Dtype, *, full: bool, as_json: bool) -> None:
    """Decode, compare and report."""
    on_gpu = torch.cuda.is_available()
    exact = dtype == "float32" and not on_gpu
    config, weights = model.config.get_text_config(), weight_versions(model)
    stops = stop_tokens(config)
    requests = requests_for(size, config.vocab_size, stops)
    with engines_for(model_dir, config.vocab_size, size, dtype, "own" if full or on_gpu else "same") as engines:
        parity = Parity(engines, requests, weights, echo_tool(config.vocab_size, stops))
        parity.decode_alive()
        if full:
            parity.decode_killed(kill_children)
        found = rows(parity, model.to("cuda" if on_gpu else "cpu"), weights, exact=exact)
        names = ", ".join(engine.name for engine in engines.values())
    new, old = (parity.arms[name].decoding.answers for name in ("torch" + NEW_WEIGHTS, "torch"))
    finish(
        "engine_parity",
        found,
        targets(found, compare(new, old).identical, exact=exact, small=size == SMALL),
        as_json=as_json,
        notes={"engines": names, "in_flight": size.in_flight, "tokens_max": size.tokens, "dtype": dtype},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--full", action="store_true", help="vLLM in a process of its own, which is killed once, too")
    parser.add_argument("--small", action="store_true", help="few responses, to try the code")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face model instead of a small random one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args()
    if installed_version() is None:
        parser.error("vLLM is not installed, and there is nothing to compare; see docs/guide/first_run.md")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    size = SMALL if options.small else DEFAULT
    with tempfile.TemporaryDirectory() as folder:
        model_dir = options.model or Path(folder)
        try:
            if options.model:
                model_config(model_dir)  # for its errors
                model = AutoModelForCausalLM.from_pretrained(
                    model_dir, dtype=getattr(torch, options.dtype), local_files_only=True, trust_remote_code=False
                ).eval()
            else:
                model = random_model().to(getattr(torch, options.dtype))
                model.config.save_pretrained(model_dir)
            measure(model, model_dir, size, options.dtype, full=options.full, as_json=options.json)
        except EngineError as error:
            parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
