"""`make demo-shared`: three runs on one trainer, against the same three runs with a trainer each.

Both arms train the same three tiny policies by `pyflyte run`, side by side, on this machine. Rollouts take time because
their engine sleeps at each step; training is real. A run with a trainer of its own holds it for as long as the run
lasts. The three that share one hold a host, which is a process of this machine. The demo compares all tensors of all
checkpoints and weights, the seconds for which trainers are held, and how much longer an iteration takes.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from examples.run_workflow import exit_if_failed
from examples.warm_start import build_model, build_tokenizer
from storage.records.run import read_plan, reports
from storage.stores.connect import connect
from storage.weights.tensor_sets import TensorEntry, read_manifest
from tasks.preparing.local_training import END_TIME_LIMIT_S, ROOT, workflow_command

RUNS = ("red", "green", "blue")
TRAINERS = {"alone": "a trainer each", "shared": "one host"}
ITERATIONS = 4
# A rollout takes about the longest response times this.
STEP_S = 0.12
RESPONSE_LENGTH = 96
HELD_LESS, SLOWDOWN_MAX = 0.55, 1.15
MANIFEST = "manifest.json"
console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Arm:
    """The three runs of one arm. held_s: trainer-seconds. cycle_s: by run, the mean seconds of an iteration."""

    held_s: float
    cycle_s: dict[str, float]
    states: dict[str, dict[str, dict[str, TensorEntry]]]


def settings(url: Path, model: Path, seed: int, trainer: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one run."""
    return {
        "run": {"url": str(url), "seed": seed, "num_prompts_per_step": 8, "num_generations": 4},
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "limit": 256},
        "rewards": [{"function": "examples.even_share:even_share"}],
        "sampling": {"max_completion_length": RESPONSE_LENGTH},
        "rollout": {
            "engine": "scripted",
            "scripted_step_s": STEP_S,
            "context_length": 192,
            "flush_interval_s": 0.5,
            "idle_timeout_s": 0.0,
        },
        "algorithm": {"micro_batch_order": "plan"},
        "optimizer": {"learning_rate": 1e-3},
        "trainer": {"group_timeout_s": 300, **trainer},
        "planning": {"seeding": "off"},
        "retention": {"keep_weights": 1000, "keep_checkpoints": 1000},
        "pools": {"rollout": {"count": 1, "cpu": "1", "memory": "2Gi"}, "train": {"cpu": "1", "memory": "2Gi"}},
    }


def gleaner(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "gleaner.py"), *arguments]


@contextmanager
def ended(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """End the processes that still run when the block ends."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(END_TIME_LIMIT_S)


def train(configs: dict[str, Path], folder: Path, iterations: int) -> None:
    """Train all runs side by side, as three users do; exits if one fails."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for name, config in configs.items():
        log = (folder / f"{name}.log").open("wb")
        processes[name] = subprocess.Popen(
            workflow_command(config, iterations), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        )
    with ended(list(processes.values())):
        for name, process in processes.items():
            exit_if_failed(process.wait(), folder / f"{name}.log")


def run_arm(folder: Path, model: Path, iterations: int, *, shared: bool) -> Arm:
    """Train the three runs with a trainer each, or with one host, below `folder`."""
    fleet, runs = folder / "fleet", folder / "runs"
    runs.mkdir(parents=True)
    trainer = {"placement": "shared", "fleet": str(fleet)} if shared else {}
    configs = {name: folder / f"{name}.yaml" for name in RUNS}
    for seed, (name, config) in enumerate(configs.items()):
        config.write_text(yaml.safe_dump(settings(runs / name, model, seed, trainer), sort_keys=False))
    hosts = []
    if shared:
        subprocess.run(gleaner("fleet", "init", str(fleet), "--runs", str(runs)), check=True, stdout=subprocess.DEVNULL)
        cycle_s = str(STEP_S * RESPONSE_LENGTH)
        for config in configs.values():
            admit = gleaner("fleet", "admit", str(config), "--phase-s", "1", "--cycle-s", cycle_s)
            subprocess.run(admit, check=True, stdout=subprocess.DEVNULL)
        # Each run has one rank, whatever GPUs this machine has.
        how = ("--memory-gib", "4", "--devices", "1", "--poll-interval-s", "0.1")
        serve = gleaner("fleet", "host", str(fleet), *how)
        hosts = [subprocess.Popen(serve, stdout=(folder / "host.log").open("wb"), stderr=subprocess.STDOUT, cwd=ROOT)]
    with ended(hosts):
        train(configs, folder, iterations)
    urls = {name: str(runs / name) for name in RUNS}
    lasting = {name: lasting_s(url) for name, url in urls.items()}
    # One trainer is held from the first plan of any run to the last report of any.
    held_s = max(end for _, end in lasting.values()) - min(begin for begin, _ in lasting.values())
    return Arm(
        held_s=held_s if shared else sum(end - begin for begin, end in lasting.values()),
        cycle_s={name: (end - begin) / iterations for name, (begin, end) in lasting.items()},
        states={name: states(url) for name, url in urls.items()},
    )


def lasting_s(url: str) -> tuple[float, float]:
    """When the first plan of a run was made and its last report, in Unix seconds."""
    store = connect(url)
    return read_plan(store, 0).created_at_s, reports(store)[-1].created_at_s


def states(url: str) -> dict[str, dict[str, TensorEntry]]:
    """All tensors of all checkpoints and weights, by prefix and name; entries carry digests."""
    store = connect(url)
    prefixes = [key.removesuffix(MANIFEST) for key in store.list("") if key.endswith(f"/{MANIFEST}")]
    return {prefix: dict(read_manifest(store, prefix).tensors) for prefix in prefixes}


def report(alone: Arm, shared: Arm, iterations: int) -> dict[str, Any]:
    """Print the comparison, and return it."""
    grid = Table("run", "iteration alone s", "shared s", "slowdown", "same tensors")
    slowdowns, equal = {}, {}
    for name in RUNS:
        slowdowns[name] = shared.cycle_s[name] / alone.cycle_s[name]
        equal[name] = shared.states[name] == alone.states[name] and len(alone.states[name]) >= 2 * iterations
        row = (f"{alone.cycle_s[name]:.1f}", f"{shared.cycle_s[name]:.1f}", f"{slowdowns[name]:.3f}")
        grid.add_row(name, *row, "yes" if equal[name] else "NO")
    console.print(grid)
    less, bound = 1 - shared.held_s / alone.held_s, 1 - 1 / len(RUNS)
    console.print(
        f"trainers held: {alone.held_s:.0f} s alone, {shared.held_s:.0f} s shared: {less:.1%} less (three runs of one "
        f"length: at most {bound:.1%}); longest slowdown {max(slowdowns.values()):.3f}"
    )
    return {
        "held_less": less,
        "slowdown_max": max(slowdowns.values()),
        "slowdown_median": statistics.median(slowdowns.values()),
        "equal": all(equal.values()),
        "passed": all(equal.values()) and less >= HELD_LESS and max(slowdowns.values()) <= SLOWDOWN_MAX,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train three runs on one trainer, and compare with a trainer each.")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-shared-", dir=arguments.directory.resolve()))
    model, tokenizer = folder / "model", build_tokenizer()
    build_model(len(tokenizer)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    arms = {}
    for name in TRAINERS:
        console.print(
            f"three runs, {'one host' if name == 'shared' else 'a trainer each'}, {arguments.iterations} iterations"
        )
        arms[name] = run_arm(folder / name, model, arguments.iterations, shared=name == "shared")
    summary = report(arms["alone"], arms["shared"], arguments.iterations)
    console.print(
        f"{'all good' if summary['passed'] else 'NOT as promised'}, {time.monotonic() - started_s:.0f} s; {folder}"
    )
    if arguments.json:
        print(json.dumps(summary))
    sys.exit(not summary["passed"])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
