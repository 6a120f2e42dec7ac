"""What both arms of benchmarks.trainer train on, and how a process of theirs takes and measures its steps.

Needs nothing but Python, because TRL's arm runs under another one. A process takes a line on standard input per step,
and answers with a JSON line.
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
# The norm is computed as in a real step, and its value is comparable, because it is never clipped.
GRAD_NORM_MAX = 1e6


@dataclass(frozen=True)
class Work:
    """One optimizer step: P x G responses of a random model.

    Attributes:
        model_dir: With the model both arms read.
        vocab_size: V.
        completion_length: T, of every response, or the limit where lengths differ.
        ragged: Whether lengths differ: log-normal with median T / 4, as of rollouts whose long ones are cut.
        prompts: P.
        generations: G.
        prompt_length: Of every prompt; where lengths differ, of half to one and a half times that.
        responses_per_pass: How many responses of full length a forward pass holds at most.
        steps: How many the process takes before it ends.
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
        """The most tokens that a prompt with its completion may have."""
        return self.prompt_length * 3 // 2 + self.completion_length

    def as_argument(self) -> str:
        """JSON, the one argument of an arm's process."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Sample:
    """One response with its prompt and its advantage."""

    prompt: list[int]
    completion: list[int]
    advantage: float


def work_of_arguments() -> Work:
    """The work that this process was started for."""
    return Work(**json.loads(sys.argv[1]))


def samples(work: Work) -> list[Sample]:
    """The responses of a step in the order of their groups; the same in every process."""
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
    """Measures one step at a time, each asked for with a line: "time", or "memory" for the growth of memory in it."""

    def __init__(self) -> None:
        self._measures_memory = False
        self._resident_bytes = 0
        self._began_s = self._began_user_s = 0.0

    def begin(self) -> None:
        """Wait until a step is asked for."""
        asked = sys.stdin.readline().strip()
        if not asked:
            sys.exit()
        self._measures_memory = asked == "memory"
        if self._measures_memory:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self._resident_bytes = _status_bytes("VmRSS")
            # From here on the high-water mark is that of the step; see proc(5).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._began_user_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        self._began_s = time.perf_counter()

    def end(self, **figures: float) -> None:
        """Answer with the seconds since `begin`, or with the bytes, and with `figures` about the step."""
        measured = {
            "wall_s": time.perf_counter() - self._began_s,
            "user_s": resource.getrusage(resource.RUSAGE_SELF).ru_utime - self._began_user_s,
        }
        if self._measures_memory:
            measured["growth_bytes"] = _status_bytes("VmHWM") - self._resident_bytes
        answer(measured | figures)


def answer(message: dict[str, Any]) -> None:
    """Write one JSON line to the standard output that the process was started with."""
    os.write(_ANSWERS, (json.dumps(message) + "\n").encode())


def keep_answers_apart() -> None:
    """From now on, whatever else is printed goes to standard error."""
    global _ANSWERS  # noqa: PLW0603 - a process has one standard output
    _ANSWERS = os.dup(1)
    os.dup2(2, 1)


_ANSWERS = 1


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) * 1024
