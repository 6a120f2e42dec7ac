"""The work of both arms of benchmarks.trainer, and the measurement of steps in an arm's process.

This module needs only the standard library, because TRL's arm runs under another Python. A process takes one step per
line on standard input, and answers with a JSON line.
"""

import ctypes
import gc
import json
import os
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-6
CLIP_RATIO_LOW, CLIP_RATIO_HIGH = 0.2, 0.28
# The norm is computed as in a real step but never clips, so its value can be compared.
GRAD_NORM_MAX = 1e6


@dataclass(frozen=True)
class Work:
    """One optimizer step: P x G responses of a random model.

    Attributes:
        model_dir: The directory of the model that both arms read.
        vocab_size: V.
        completion_length: T, the length of every response, or the limit if lengths differ.
        ragged: Whether lengths differ: log-normal with median T / 4, cut at the limit as in rollouts.
        prompts: P.
        generations: G.
        prompt_length: The length of every prompt; if lengths differ, prompts have 0.5 to 1.5 times that.
        responses_per_pass: The most responses of full length in a forward pass.
        steps: The number of steps after which the process ends.
    """

    model_dir: str
    vocab_size: int
    completion_length: int
    ragged: bool = False
    prompts: int = 4
    generations: int = 8
    prompt_length: int = 32
    responses_per_pass: int = 8
    steps: int = 9

    @property
    def longest(self) -> int:
        """The most tokens of a prompt with its completion."""
        return self.prompt_length * 3 // 2 + self.completion_length

    def as_argument(self) -> str:
        """The work as JSON, the only argument of an arm's process."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Sample:
    """One response with its prompt and its advantage."""

    prompt: list[int]
    completion: list[int]
    advantage: float


def work_of_arguments() -> Work:
    """The work from this process's argument."""
    return Work(**json.loads(sys.argv[1]))


def samples(work: Work) -> list[Sample]:
    """The responses of a step, in the order of their groups; the same in every process."""
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return rng.choices(range(3, work.vocab_size), k=length)

    found = []
    for _ in range(work.prompts):
        half = work.prompt_length // 2
        prompt = draw(rng.randint(half, 3 * half) if work.ragged else work.prompt_length)
        found += [Sample(prompt, draw(_completion_length(work, rng)), rng.gauss(0, 1)) for _ in range(work.generations)]
    return found


def _completion_length(work: Work, rng: random.Random) -> int:
    if not work.ragged:
        return work.completion_length
    return max(4, min(work.completion_length, round(rng.lognormvariate(0, 0.9) * work.completion_length / 4)))


class Meter:
    """Measures one step per input line: "time", or "memory" for the growth of memory during the step."""

    def __init__(self) -> None:
        self._measures_memory = False
        self._resident_bytes = 0
        self._began_s = self._began_user_s = 0.0

    def begin(self) -> None:
        """Wait for the next step's line."""
        asked = sys.stdin.readline().strip()
        if not asked:
            sys.exit()
        self._measures_memory = asked == "memory"
        if self._measures_memory:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self._resident_bytes = _status_bytes("VmRSS")
            # This resets the peak of resident memory, so that it is that of the step; see proc(5).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._began_user_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        self._began_s = time.perf_counter()

    def end(self, **figures: float) -> None:
        """Answer with the seconds since `begin` or with the bytes, and with `figures` of the step."""
        measured = {
            "wall_s": time.perf_counter() - self._began_s,
            "user_s": resource.getrusage(resource.RUSAGE_SELF).ru_utime - self._began_user_s,
        }
        if self._measures_memory:
            measured["growth_bytes"] = _status_bytes("VmHWM") - self._resident_bytes
        answer(measured | figures)


def answer(message: dict[str, Any]) -> None:
    """Write one JSON line to the process's original standard output."""
    os.write(_ANSWERS, (json.dumps(message) + "\n").encode())


def keep_answers_apart() -> None:
    """Redirect all other output to standard error from now on."""
    global _ANSWERS  # noqa: PLW0603 - a process has one standard output
    _ANSWERS = os.dup(1)
    os.dup2(2, 1)


_ANSWERS = 1


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) * 1024
