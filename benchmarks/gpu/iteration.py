"""Iterations of real size on this machine by production's code: plan, rollout by two members, training, conclusion.

The members stand, each in a process of its own on the same device. In the last iteration one of them is killed, and the
other one takes over its responses.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from benchmarks.gpu.model import CONTEXT_LENGTH_MAX, write_model
from benchmarks.gpu.sizes import Size
from examples.warm_start import build_tokenizer
from storage.clock import SystemClock
from storage.journal.liveness import read_heartbeat
from storage.records import layout
from storage.records.records import ReportRecord
from storage.records.run import exists
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig, parse
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.engines.vllm_names import installed_version
from tasks.sampling.session.session_outcome import Preempted
from tasks.sampling.session.standing import Post, stand

_ROOT = Path(__file__).parents[2]
_EXECUTION = "benchmark"
_USD_PER_H = {"rollout": 0.0, "train": 0.0}
_MEMBERS = 2
# The first one has the members' starts in it.
_ITERATIONS = {"with starts": 0, "undisturbed": 1, "a member killed": 2}
_KILLED_IN = 2
# The metrics of the report that say most about how well the machine was used; besides all seconds.
_METRICS = ("num_tokens", "importance/ratio_min", "importance/ratio_max", "importance/ess")
_RESUMED = ("resume/tokens_recovered", "resume/tokens_regenerated")
_MEMORY_SHARE, _CACHE_BYTES = 0.2, 12 << 30
_ENDS_WITHIN_S = 20.0
_LOOK_INTERVAL_S = 0.02


def measure(size: Size) -> Iterator[dict[str, Any]]:
    """Seconds of each phase of each iteration, and the share of an undisturbed one in which the GPU works."""
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        model = folder / "model"
        model.mkdir()
        write_model(size.shape, model, size.device)
        build_tokenizer().save_pretrained(model)
        config, clock = settings(size, model, f"{folder}/run"), SystemClock()
        found: dict[str, Any] = {"engine": config.rollout.engine, "iterations": {}, "gpu_busy_share": None}
        store = connect(config.run.url)
        for name, iteration in _ITERATIONS.items():
            seconds: dict[str, float] = {}
            with _Load() as load:
                _timed(seconds, "plan", lambda: prepare(config, _EXECUTION, clock))
                if iteration == 0:
                    for slot in range(_MEMBERS):
                        closing.callback(_ended, _member(config.run.url, slot))
                kill = _Kill(store, iteration) if iteration == _KILLED_IN else None
                _timed(seconds, "train", partial(train_iteration, config.run.url, iteration, _EXECUTION, clock))
                report = _timed(seconds, "conclude", partial(conclude_iteration, store, iteration, _USD_PER_H, clock))
            found["iterations"][name] = {f"{task}, s": spent for task, spent in seconds.items()} | _metrics(report)
            if kill is not None:
                found["iterations"][name] |= {"killed": kill.incarnation in {life.incarnation for life in report.lives}}
            elif iteration:
                found["gpu_busy_share"] = load.share
            yield found


def _metrics(report: ReportRecord) -> dict[str, float]:
    names = [*_METRICS, *_RESUMED, *(name for name in report.metrics if name.startswith("timing_s/"))]
    return {name: report.metrics[name] for name in names if name in report.metrics}


def settings(size: Size, model: Path, url: str) -> RunConfig:
    """The configuration of the run; vLLM generates where it is installed, except on a CPU."""
    on_gpu = size.device == "cuda"
    dtype = "bfloat16" if on_gpu else "float32"
    return parse(
        {
            "run": {"url": url, "num_prompts_per_step": size.iteration_prompts, "num_generations": 8},
            "policy": {"path": str(model)},
            "data": {"source": "arithmetic", "limit": len(_ITERATIONS) * size.iteration_prompts},
            "rewards": [{"function": "arithmetic"}],
            "sampling": {"max_completion_length": size.iteration_tokens},
            "rollout": {
                "crew": "standing",
                "engine": "vllm" if on_gpu and installed_version() is not None else "torch",
                "dtype": dtype,
                "context_length": min(CONTEXT_LENGTH_MAX, size.iteration_tokens + 128),
                "max_responses_in_flight": size.responses,
                "flush_interval_s": size.flush_interval_s,
                "claim_ttl_s": 5.0,
                # Both members start beside each other and beside the trainer, so vLLM may not measure memory.
                "vllm": {
                    "gpu_memory_utilization": _MEMORY_SHARE,
                    "kv_cache_memory_bytes": _CACHE_BYTES,
                    **({"cache_dir": size.caches} if size.caches else {}),
                },
            },
            "trainer": {"dtype": dtype, "gradient_checkpointing": on_gpu},
            "pools": {"rollout": {"count": _MEMBERS, "gpus": int(on_gpu)}, "train": {"gpus": int(on_gpu)}},
        }
    )


def _timed(seconds: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    began_s = time.perf_counter()
    result = work()
    seconds[name] = time.perf_counter() - began_s
    return result


def _member(url: str, slot: int) -> "subprocess.Popen[bytes]":
    # In the part's process group, which is ended as a whole.
    return subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.iteration", url, str(slot)], cwd=_ROOT)


def _ended(member: "subprocess.Popen[bytes]") -> None:
    member.terminate()
    with suppress(subprocess.TimeoutExpired):
        member.wait(_ENDS_WITHIN_S)
    member.kill()
    member.wait()


class _Kill:
    """Kills the member of the last slot as soon as it has journalled something in an iteration."""

    def __init__(self, store: ObjectStore, iteration: int) -> None:
        self._store, self._iteration = store, iteration
        self.incarnation = ""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.incarnation and not exists(self._store, layout.closed(self._iteration)):
            time.sleep(_LOOK_INTERVAL_S)
            for key in self._store.list(layout.alive_all(self._iteration)):
                alive = read_heartbeat(self._store, key)
                if alive is None or alive.slot != _MEMBERS - 1 or alive.state != "working":
                    continue
                if exists(self._store, layout.shard(self._iteration, alive.incarnation, 0)):
                    os.kill(alive.pid, signal.SIGKILL)
                    self.incarnation = alive.incarnation


class _Load:
    """The mean utilization of the GPU in a block, by nvidia-smi. share: None without it."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0", "-lms"]
            self._child = subprocess.Popen([*command, "200"], stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.terminate()
            said, _error = self._child.communicate()
            values = [float(line) / 100 for line in said.splitlines() if line.strip().isdigit()]
            self.share = sum(values) / len(values) if values else None


def main() -> None:
    """Stand for a slot of the run, until its last iteration is closed or SIGTERM."""
    url, slot = sys.argv[1:]
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    post = Post(run_url=url, execution=_EXECUTION, slot=int(slot), first=0, iterations=len(_ITERATIONS))
    with suppress(Preempted):
        stand(post, told.is_set, SystemClock())


if __name__ == "__main__":
    main()
