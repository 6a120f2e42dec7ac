"""A crew of real processes on this machine that can be killed, without Flyte around them.

Workers are forked from a server that has imported everything and computed nothing, so a benchmark measures the work and
not Python's imports; the time a new process really takes to start is a separate figure (`cold_start_s`).
"""

import mmap
import multiprocessing
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from storage.clock import SystemClock
from storage.weights import TensorBlock
from tasks.sampling.choose import build_engine
from tasks.sampling.config import RolloutConfig
from tasks.sampling.engine import Engine, GenerationRequest, TokenDelta
from tasks.sampling.member import generate_slot

PRELOAD = ["benchmarks.crew", "tasks.sampling.torch_engine", "tasks.plan", "examples.warm_start"]
ROW = struct.Struct("dq")
STEPS_MAX = 200_000
POLL_INTERVAL_S = 0.001


class StepLog:
    """What a worker decoded and when, in a file mapped into memory: it survives SIGKILL to the last step."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(b"")
            os.truncate(path, ROW.size * (STEPS_MAX + 1))
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), ROW.size * (STEPS_MAX + 1))

    def add(self, tokens: int) -> None:
        steps, total = self.steps(), self.tokens()
        ROW.pack_into(self._map, ROW.size * (steps + 1), time.monotonic(), total + tokens)
        ROW.pack_into(self._map, 0, float(steps + 1), total + tokens)

    def steps(self) -> int:
        return int(ROW.unpack_from(self._map, 0)[0])

    def tokens(self) -> int:
        return int(ROW.unpack_from(self._map, 0)[1])

    def rows(self) -> list[tuple[float, int]]:
        """(monotonic time, tokens decoded until then) per step."""
        return [ROW.unpack_from(self._map, ROW.size * (step + 1)) for step in range(self.steps())]


class LoggedEngine:
    """An engine that writes what it decoded into a StepLog."""

    def __init__(self, engine: Engine, log: StepLog) -> None:
        self._engine = engine
        self._log = log

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def batch_invariant(self) -> bool:
        return self._engine.batch_invariant

    @property
    def max_responses_in_flight(self) -> int:
        return self._engine.max_responses_in_flight

    @property
    def prefill_tokens(self) -> int:
        return self._engine.prefill_tokens

    def load_weights(self, version: int, tensors: Mapping[str, TensorBlock]) -> None:
        self._engine.load_weights(version, tensors)

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        self._engine.start(requests)

    def step(self) -> list[TokenDelta]:
        deltas = self._engine.step()
        self._log.add(sum(len(delta.token_ids) for delta in deltas))
        return deltas

    def abort(self, responses: Sequence[int]) -> None:
        self._engine.abort(responses)

    def close(self) -> None:
        self._engine.close()


def slot_process(run_url: str, iteration: int, slot: int, log_path: str) -> None:
    """The body of a worker: what the rollout task runs, with a logged engine."""
    log = StepLog(Path(log_path))

    def build(config: RolloutConfig, model_dir: Path, vocab_size: int) -> Engine:
        return LoggedEngine(build_engine(config, model_dir, vocab_size), log)

    generate_slot(run_url, iteration, slot, lambda: False, SystemClock(), build)


@dataclass(frozen=True)
class Killed:
    """One SIGKILL: whose, when, and the worker's log until then."""

    slot: int
    pid: int
    at_s: float
    log: StepLog


@dataclass
class Crew:
    """Starts workers, kills them after a random amount of work, starts their successors, and waits for the end."""

    folder: Path
    kills: list[Killed] = field(default_factory=list)
    _started: int = 0

    def __post_init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self.folder.mkdir(parents=True, exist_ok=True)

    def warm_up(self) -> None:
        """Start the server that workers are forked from, so that its imports are nobody's time."""
        process = self._context.Process(target=os.getpid)
        process.start()
        process.join()

    def run(
        self,
        body: Callable[..., None],
        arguments: Sequence[tuple[object, ...]],
        schedule: Sequence[Sequence[int]],
    ) -> float:
        """Run body(*arguments[slot], log path) for every slot, with schedule[slot] kills; seconds until all have ended.

        An entry k of a schedule kills that slot's k-th process life once it has decoded so many tokens; a life that
        ends earlier is spared.
        """
        started_s = time.monotonic()
        lives: dict[int, tuple[ForkServerProcess, StepLog, list[int]]] = {}
        for slot, given in enumerate(arguments):
            lives[slot] = (*self._start(body, given), list(schedule[slot]))
        while lives:
            for slot, (process, log, kills) in list(lives.items()):
                if kills and process.is_alive() and log.tokens() >= kills[0]:
                    self._kill(slot, process, log)
                    lives[slot] = (*self._start(body, arguments[slot]), kills[1:])
                elif not process.is_alive():
                    process.join()
                    if process.exitcode != 0:
                        raise RuntimeError(f"slot {slot} ended with exit code {process.exitcode}")
                    del lives[slot]
            time.sleep(POLL_INTERVAL_S)
        return time.monotonic() - started_s

    def tokens(self) -> int:
        """Tokens decoded by all process lives together."""
        return sum(StepLog(path).tokens() for path in sorted(self.folder.glob("*.steps")))

    def _start(self, body: Callable[..., None], arguments: Sequence[object]) -> tuple[ForkServerProcess, StepLog]:
        path = self.folder / f"{self._started:05d}.steps"
        self._started += 1
        log = StepLog(path, create=True)
        process = self._context.Process(target=body, args=(*arguments, str(path)))
        process.start()
        return process, log

    def _kill(self, slot: int, process: ForkServerProcess, log: StepLog) -> None:
        if process.pid is None:
            raise RuntimeError("a started process has a pid")
        os.kill(process.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        process.join()
        self.kills.append(Killed(slot, process.pid, killed_s, log))


def kill_schedule(seed: int, slots: int, kills: int, low: int, high: int) -> list[list[int]]:
    """Token counts, uniform in [low, high], at which `kills` lives end, dealt to the slots in turn."""
    rng = random.Random(seed)
    counts = [rng.randint(low, high) for _ in range(kills)]
    return [counts[slot::slots] for slot in range(slots)]


def cold_start_s() -> float:
    """How long a new Python takes until it could start to decode: what every restart costs besides, on any design."""
    started_s = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", "import benchmarks.crew, tasks.sampling.torch_engine, transformers"], check=True
    )
    return time.monotonic() - started_s
