"""Claim: a process that generates and trains iteration after iteration stays as large as it was after the first few.

Two arms, each a process of its own, live through the same iterations of the demo's size, in which no two iterations
have the same lengths: Gleaner as it is; and Gleaner with a leak of 4 MiB an iteration, which is there to show that the
measure finds what grows. The figure is the resident memory after each iteration.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.reporting import Target, finish

LEAK_BYTES = 4 << 20
ARMS = {"as it is": 0, "with a leak": LEAK_BYTES}
# The first iterations load code and fill caches; the medians of two windows of this length are compared.
SETTLED, WINDOW = 5, 10
GROWTH_MAX = 1.05
MIB = 1 << 20


def settings(url: str, model: Path) -> dict[str, Any]:
    """The demo's sizes, with one slot, and prompts enough for all iterations."""
    return {
        "run": {"url": url, "seed": 7, "num_prompts_per_step": 32, "num_generations": 8},
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "limit": 4096},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": 112},
        "rollout": {
            "engine": "torch",
            "context_length": 192,
            "max_responses_in_flight": 64,
            "flush_interval_s": 0.05,
        },
        "optimizer": {"learning_rate": 1e-4},
        "trainer": {"group_timeout_s": 600},
        "pools": {"rollout": {"count": 1}},
    }


def live(folder: Path, iterations: int, leak_bytes: int) -> None:
    """Print the resident memory in MiB after each iteration, a number a line."""
    # Here, because the parent needs none of it.
    from examples.warm_start import build_model, build_tokenizer  # noqa: PLC0415
    from storage.clock import SystemClock  # noqa: PLC0415
    from storage.stores.connect import connect  # noqa: PLC0415
    from tasks.configuration.run_config import parse  # noqa: PLC0415
    from tasks.learning.train_iteration import train_iteration  # noqa: PLC0415
    from tasks.preparing.iteration import prepare  # noqa: PLC0415
    from tasks.reporting.conclusion import conclude_iteration  # noqa: PLC0415
    from tasks.sampling.session.member import generate_slot  # noqa: PLC0415

    tokenizer = build_tokenizer()
    build_model(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    url, clock = str(folder / "run"), SystemClock()
    config = parse(settings(url, folder / "model"))
    leaked = []
    for _ in range(iterations):
        reference, _ = prepare(config, "benchmark", clock)
        generate_slot(url, reference.iteration, 0, lambda: False, clock)
        train_iteration(url, reference.iteration, "benchmark", clock)
        conclude_iteration(connect(url), reference.iteration, {"rollout": 0.0, "train": 0.0}, clock)
        leaked.append(b"x" * leak_bytes)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        print(pages * os.sysconf("SC_PAGE_SIZE") / MIB, flush=True)


def lived(arm: str, iterations: int) -> list[float]:
    """The resident memory in MiB of one arm's process after each iteration."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["--iterations", str(iterations), "--leak-bytes", str(ARMS[arm])]
        command = [sys.executable, "-m", "benchmarks.memory", "--live-in", folder, *sizes]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [float(line) for line in done.stdout.split()]


def windows(sizes: list[float]) -> tuple[float, float]:
    """The medians of the first settled window and of the last one."""
    return statistics.median(sizes[SETTLED : SETTLED + WINDOW]), statistics.median(sizes[-WINDOW:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--live-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--leak-bytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.live_in is not None:
        live(options.live_in, options.iterations, options.leak_bytes)
        return
    if options.iterations < SETTLED + 2 * WINDOW:
        parser.error(f"--iterations: value {options.iterations}; allowed: {SETTLED + 2 * WINDOW} or more")
    sizes = {arm: lived(arm, options.iterations) for arm in ARMS}
    rows, growth = [], {}
    for arm, found in sizes.items():
        early, late = windows(found)
        growth[arm] = late / early
        rows.append({"arm": arm, "first MiB": found[0], "early MiB": early, "late MiB": late, "growth": growth[arm]})
    what = f"resident memory of the last {WINDOW} of {options.iterations} iterations over that of iterations"
    target = Target(f"{what} {SETTLED} to {SETTLED + WINDOW - 1}", growth["as it is"], f"<= {GROWTH_MAX}")
    finish("memory", rows, [target], as_json=options.json, results={"mib": sizes})


if __name__ == "__main__":
    main()
