"""A crew of real processes on this machine that can be killed, without Flyte.

Workers are forked from a server that has imported everything and computed nothing, so that a benchmark measures work,
not Python's imports; the real start-up time of a new process is a separate figure (`cold_start_s`). vLLM is imported in
the server too, but starts in the worker, which takes seconds of every process life.
"""

import gc
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
from typing import Literal, NamedTuple

from storage.clock import SystemClock
from storage.records.draft_totals import DraftTotals
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import RolloutConfig, VllmConfig
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.engines.engine import Engine, GenerationRequest, TokenDelta
from tasks.sampling.engines.vllm_names import NAMES
from tasks.sampling.engines.vllm_settings import prepare_environment
from tasks.sampling.session.member import generate_slot

PRELOAD = ["benchmarks.baselines", "tasks.sampling.engines.torch_engine", "tasks.plan", "examples.warm_start"]
# Importing the sampler imports most of vLLM's model code.
VLLM_PRELOAD = ["tasks.sampling.engines.vllm_engine", "tasks.sampling.engines.vllm_sampler"]
# Otherwise every vLLM logs the same few lines at its start.
VLLM_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore:resource_tracker:UserWarning",
}
HEADER = struct.Struct("qq")
ROW = struct.Struct("ddqq")
ROWS_MAX = 200_000
PREFILL = -1
POLL_INTERVAL_S = 0.001


class Decoded(NamedTuple):
    """A response's part of an engine step: when the step ended, the part of its duration, the response, its tokens.

    The response of a prefill is PREFILL.
    """

    at_s: float
    duration_s: float
    response: int
    tokens: int


class StepLog:
    """A log of what a worker decoded and when, in a memory-mapped file that keeps every step after SIGKILL."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        size = HEADER.size + ROW.size * ROWS_MAX
        if create:
            path.write_bytes(b"")
            os.truncate(path, size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def add(self, row: Decoded) -> None:
        count, total = HEADER.unpack_from(self._map, 0)
        ROW.pack_into(self._map, HEADER.size + ROW.size * count, *row)
        HEADER.pack_into(self._map, 0, count + 1, total + row.tokens)

    def tokens(self) -> int:
        return int(HEADER.unpack_from(self._map, 0)[1])

    def rows(self) -> list[Decoded]:
        """All rows so far, in order; times are on the machine's monotonic clock, which its processes share."""
        count = HEADER.unpack_from(self._map, 0)[0]
        return [Decoded(*ROW.unpack_from(self._map, HEADER.size + ROW.size * row)) for row in range(count)]


class LoggedEngine:
    """An engine that writes what it decoded into a StepLog, and takes at least `step_time_s` per step.

    It sleeps for the rest of a step, so that many workers can share few cores and do not get faster when one dies.
    """

    def __init__(self, engine: Engine, log: StepLog, step_time_s: float = 0.0) -> None:
        self._engine = engine
        self._log = log
        self._step_time_s = step_time_s

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

    @property
    def draft_totals(self) -> DraftTotals | None:
        return self._engine.draft_totals

    @property
    def weight_version(self) -> int | None:
        return self._engine.weight_version

    @property
    def patch_base(self) -> int | None:
        return self._engine.patch_base

    def load_weights(self, version: int, tensors: Mapping[str, TensorBlock]) -> None:
        self._engine.load_weights(version, tensors)

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        began_s = time.monotonic()
        self._engine.start(requests)
        now_s = time.monotonic()
        self._log.add(Decoded(now_s, now_s - began_s, PREFILL, 0))

    def step(self) -> list[TokenDelta]:
        began_s = time.monotonic()
        deltas = self._engine.step()
        time.sleep(max(0.0, began_s + self._step_time_s - time.monotonic()))
        now_s = time.monotonic()
        share_s = (now_s - began_s) / max(1, len(deltas))
        for delta in deltas:
            self._log.add(Decoded(now_s, share_s, delta.response, len(delta.token_ids)))
        return deltas

    def abort(self, responses: Sequence[int]) -> None:
        self._engine.abort(responses)

    def restart(self) -> None:
        self._engine.restart()

    def close(self) -> None:
        self._engine.close()


def logged_engine(
    config: RolloutConfig, model_dir: Path, vocab_size: int, log: StepLog, step_time_s: float
) -> LoggedEngine:
    """Start the engine of a worker."""
    if config.engine == "vllm":
        # vLLM collects garbage at its start, which visits all imported objects: half of the start's time here.
        gc.freeze()
    return LoggedEngine(build_engine(config, model_dir, vocab_size), log, step_time_s)


def slot_process(run_url: str, iteration: int, slot: int, log_path: str) -> None:
    """The body of a worker: the code of the rollout task, with a logged engine."""
    paced_slot_process(run_url, iteration, slot, 0.0, log_path)


def paced_slot_process(run_url: str, iteration: int, slot: int, step_time_s: float, log_path: str) -> None:
    """The body of a worker whose engine steps take at least `step_time_s`."""
    log = StepLog(Path(log_path))

    def build(config: RolloutConfig, model_dir: Path, vocab_size: int) -> Engine:
        return logged_engine(config, model_dir, vocab_size, log, step_time_s)

    generate_slot(run_url, iteration, slot, lambda: False, SystemClock(), build)


@dataclass(frozen=True)
class Killed:
    """One SIGKILL: its slot, its time, and the worker's log until then."""

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

    def warm_up(self, engine: Literal["torch", "vllm"] = "torch") -> None:
        """Start the server from which workers are forked, so that no worker waits for its imports.

        All crews of this process share it. Raises EngineError when vLLM is wanted and missing.
        """
        if engine == "vllm":
            # vLLM reads its environment on import, and the server inherits this process's.
            for name, value in VLLM_QUIET.items():
                os.environ.setdefault(name, value)
            prepare_environment(VllmConfig(process="same"))
            places = dict.fromkeys(place.partition(":")[0] for place, _ in NAMES.values())
            self._context.set_forkserver_preload([*PRELOAD, *VLLM_PRELOAD, *places])
        process = self._context.Process(target=os.getpid)
        process.start()
        process.join()

    def run(
        self,
        body: Callable[..., None],
        arguments: Sequence[tuple[object, ...]],
        schedule: Sequence[Sequence[int]],
    ) -> float:
        """Run body(*arguments[slot], log path) for every slot with the kills schedule[slot]; seconds until all ended.

        Entry k of a slot's schedule kills the slot's k-th process life once it has decoded that many tokens, unless it
        ends earlier.
        """
        started_s = time.monotonic()
        lives: dict[int, tuple[ForkServerProcess, StepLog, list[int]]] = {}
        for slot, given in enumerate(arguments):
            lives[slot] = (*self.start(body, given), list(schedule[slot]))
        while lives:
            for slot, (process, log, kills) in list(lives.items()):
                if kills and process.is_alive() and log.tokens() >= kills[0]:
                    self._kill(slot, process, log)
                    lives[slot] = (*self.start(body, arguments[slot]), kills[1:])
                elif not process.is_alive():
                    process.join()
                    if process.exitcode != 0:
                        raise RuntimeError(f"slot {slot} ended with exit code {process.exitcode}")
                    del lives[slot]
            time.sleep(POLL_INTERVAL_S)
        return time.monotonic() - started_s

    def tokens(self) -> int:
        """The number of tokens that all process lives decoded together."""
        return sum(StepLog(path).tokens() for path in sorted(self.folder.glob("*.steps")))

    def start(self, body: Callable[..., None], arguments: Sequence[object]) -> tuple[ForkServerProcess, StepLog]:
        """Start a process of body(*arguments, log path), and return it with its log."""
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
    """Draw token counts, uniform in [low, high], at which `kills` lives are killed, dealt to the slots in turn."""
    rng = random.Random(seed)
    counts = [rng.randint(low, high) for _ in range(kills)]
    return [counts[slot::slots] for slot in range(slots)]


def cold_start_s() -> float:
    """The seconds until a new Python process could start to decode, which every restart costs in any design."""
    started_s = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", "import benchmarks.crew_processes, tasks.sampling.engines.torch_engine, transformers"],
        check=True,
    )
    return time.monotonic() - started_s
