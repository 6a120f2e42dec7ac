"""Claim: the trainer's optimizer step is faster than that of TRL's GRPOTrainer, and needs less memory.

Both sides have the same model, responses, advantages and division into forward passes, float32, one thread, sdpa
attention and no gradient checkpointing; both compute entropy and metrics. Every cell has one process per arm, and
their steps take turns. TRL runs under a Python of its own, because Gleaner does not require it.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO, Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.reporting import Measured, Target, finish, ratios
from benchmarks.trainer_work import Work, samples

ROOT = Path(__file__).parents[1]
OURS, TRL = "ours", "trl"
VOCABULARIES, COMPLETION_LENGTHS = (512, 32_768), (128, 512)
LARGE_VOCABULARY = 32_768
PAIRS = 7
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KEY_VALUE_HEADS = 128, 384, 4, 4, 2


@dataclass(frozen=True)
class Cell:
    """A compared setting: a vocabulary and a completion length, which all responses have or (ragged) do not exceed."""

    vocab_size: int
    completion_length: int
    ragged: bool

    @property
    def name(self) -> str:
        """The name for --cell."""
        return f"{self.vocab_size}x{self.completion_length}{'r' if self.ragged else ''}"


CELLS = [Cell(*each) for each in product(VOCABULARIES, COMPLETION_LENGTHS, (False, True))]


class Arm:
    """A process that takes steps, and its output on standard error."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._process, self._errors = process, errors

    def step(self, asked: str) -> dict[str, float]:
        """Take one step, measured by "time" or "memory"; raises RuntimeError when the process ends instead."""
        if self._process.stdin is None or self._process.stdout is None:
            raise ValueError("process: has no pipes")
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{asked}\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{self._process.args!r} ended with status {status}: {self._errors.read()[-2000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer


@contextmanager
def running(python: str, module: str, work: Work) -> Iterator[Arm]:
    """Start an arm's process with one thread, and end it with the context."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [python, "-m", module, work.as_argument()],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield Arm(process, errors)
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()


def main() -> None:
    """Measure the chosen cells and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="timed steps of each arm per cell")
    parser.add_argument("--cell", action="append", choices=[cell.name for cell in CELLS], help="only this one; repeat")
    parser.add_argument("--trl-python", help="a Python that has trl; default: this one, if it has")
    arguments = parser.parse_args()
    trl_python = arguments.trl_python or (sys.executable if importlib.util.find_spec("trl") else None)
    chosen = [cell for cell in CELLS if arguments.cell is None or cell.name in arguments.cell]
    rows = [measure(cell, trl_python, arguments.pairs) for cell in chosen]
    if trl_python is None:
        print("trl is not importable here: only Gleaner's step is measured; targets not measured. See --trl-python.")
    finish(
        "trainer",
        rows,
        targets(rows),
        as_json=arguments.json,
        notes={
            "pairs": arguments.pairs,
            "model": f"Qwen2, hidden {HIDDEN}, {LAYERS} layers, tied head",
            "step": f"{Work.prompts} x {Work.generations} responses, {Work.responses_per_pass} per forward pass",
            "trl": None if trl_python is None else trl_version(trl_python),
        },
        results={"targets_measured": trl_python is not None},
    )


def measure(cell: Cell, trl_python: str | None, pairs: int) -> dict[str, Any]:
    """The table row of a cell; without TRL's Python it has Gleaner's figures only."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        write_model(folder, cell.vocab_size)
        # One step warms up, one measures memory, and the others are timed.
        work = Work(folder, cell.vocab_size, cell.completion_length, ragged=cell.ragged, steps=pairs + 2)
        arms = {OURS: stack.enter_context(running(sys.executable, "benchmarks.trainer_ours", work))}
        if trl_python is not None:
            arms[TRL] = stack.enter_context(running(trl_python, "benchmarks.trainer_trl", work))
        norms = {name: arm.step("time")["grad_norm"] for name, arm in arms.items()}
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for turn in range(pairs):
            for name in sorted(arms, reverse=turn % 2 == 1):
                steps[name].append(arms[name].step("time"))
        growth_bytes = {name: arm.step("memory")["growth_bytes"] for name, arm in arms.items()}
    tokens = sum(len(sample.completion) for sample in samples(work))
    return _row(cell, tokens, norms, steps, growth_bytes)


def write_model(folder: str, vocab_size: int) -> None:
    """Write config.json and model.safetensors of a random Qwen2 with a tied head, in float32."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def _row(
    cell: Cell,
    tokens: int,
    norms: Mapping[str, float],
    steps: Mapping[str, Sequence[Mapping[str, float]]],
    growth_bytes: Mapping[str, float],
) -> dict[str, Any]:
    found: dict[str, Any] = {"cell": cell.name, "vocab": cell.vocab_size, "completion": cell.completion_length}
    found |= {"ragged": cell.ragged, "tokens": tokens, "load": round(os.getloadavg()[0], 2)}
    for name, taken in steps.items():
        found[f"{name} tokens/s"] = tokens / statistics.median(step["wall_s"] for step in taken)
        found[f"{name} user s"] = statistics.median(step["user_s"] for step in taken)
        found[f"{name} peak MiB"] = growth_bytes[name] / (1 << 20)
        found[f"{name} grad norm"] = norms[name]
    if TRL in steps:
        found["speed ratio"] = _over_ours(steps, "wall_s")
        found["user ratio"] = _over_ours(steps, "user_s")
        found["memory ratio"] = growth_bytes[OURS] / growth_bytes[TRL]
        found["grad norm difference"] = abs(norms[OURS] / norms[TRL] - 1)
    return found


def _over_ours(steps: Mapping[str, Sequence[Mapping[str, float]]], quantity: str) -> Measured:
    theirs, ours = ([step[quantity] for step in steps[name]] for name in (TRL, OURS))
    return ratios(theirs, ours)


def targets(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    """The claims, for the rows in which TRL was measured."""
    found = []
    for row in rows:
        if "speed ratio" not in row:
            continue
        found.append(row["speed ratio"].target(f"tokens_per_s_over_trl_{row['cell']}", ">= 1.3"))
        if row["vocab"] == LARGE_VOCABULARY:
            found.append(Target(f"peak_memory_over_trl_{row['cell']}", row["memory ratio"], "<= 0.7"))
        # Otherwise the arms have not done the same work.
        found.append(Target(f"grad_norm_difference_{row['cell']}", row["grad norm difference"], "<= 1e-4"))
    return found


def trl_version(python: str) -> str:
    """The version of trl in a Python installation; raises ValueError if it has none."""
    script = "from importlib.metadata import version; print(version('trl'))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"--trl-python: value {python!r}; allowed: a Python that has trl")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
