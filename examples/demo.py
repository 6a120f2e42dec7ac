"""`make demo`: trains a tiny policy by `pyflyte run` on this machine, kills a slot meanwhile, and loses nothing.

The demo makes the policy (a short supervised warm start, kept for the next time), runs the workflow, sends SIGKILL to
one slot in the middle of an iteration, compares that iteration with an undisturbed rollout of the same plan, and prints
a table. With `--engine vllm` the slots run vLLM, and the iteration is also compared with PyTorch's engine.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.compare import undisturbed_equals
from examples.run_workflow import run_workflow, show_command
from examples.warm_start import WarmStart, warm_start
from storage.journal.liveness import read_heartbeat
from storage.records import layout
from storage.records.run import exists, next_iteration, reports
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.preparing.local_training import ROOT
from tasks.viewing.run_status import table

CONFIG = ROOT / "examples" / "demo.yaml"
ITERATIONS = {"torch": 12, "vllm": 6}
ITERATION_KILLED = 2
console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass
class Kill:
    """The slot that the demo kills once it has written a shard, so that it dies in the middle of responses."""

    slot: int
    done: bool = False
    incarnation: str = ""

    def attempt(self, store: ObjectStore, iteration: int) -> None:
        """Kill the slot's process if it has begun to journal this iteration and has not ended."""
        for key in store.list(layout.alive_all(iteration)):
            alive = read_heartbeat(store, key)
            if alive is None or not exists(store, layout.shard(iteration, alive.incarnation, 0)):
                continue
            if alive.slot == self.slot and alive.state == "working":
                os.kill(alive.pid, signal.SIGKILL)
                self.done, self.incarnation = True, alive.incarnation
                console.print(f"iteration {iteration}: SIGKILL to slot {self.slot} (process {alive.pid})")


@dataclass(frozen=True)
class Outcome:
    """Whether the killed iteration equals an undisturbed one, and whether the reward rose."""

    is_identical: bool
    has_risen: bool


def make_policy(directory: Path) -> None:
    """Make the warm-started policy, which takes about a minute, unless an earlier demo has made it."""
    if directory.exists():
        console.print(f"policy: {directory} (from an earlier demo)")
        return
    with _progress() as progress:
        bar = progress.add_task("warm start", total=WarmStart.steps)
        warm_start(directory, WarmStart(), lambda step, _: progress.update(bar, completed=step))


def train(config: Path, run: Path, iterations: int, log: Path, iteration_killed: int = ITERATION_KILLED) -> Kill:
    """Run the workflow as a user does, watch the run's directory, and kill slot 1 in an iteration."""
    show_command(console, config, iterations)
    store, kill = connect(str(run)), Kill(slot=1)
    with _progress() as progress:
        bar = progress.add_task("iterations", total=iterations)

        def watch() -> None:
            done = next_iteration(store)
            progress.update(bar, completed=done)
            if done >= iteration_killed and not kill.done:
                kill.attempt(store, done)

        run_workflow(config, iterations, log, watch)
        progress.update(bar, completed=next_iteration(store))
    return kill


def report(run: Path, kill: Kill, log: Path, engine: str, example: Path = CONFIG) -> Outcome:
    """Print the results of a run with the settings of `example`."""
    history = reports(connect(str(run)))
    grid = table(history)
    grid.title = (
        f"dollars are the seconds of this machine at the listed prices of the pools in {example.relative_to(ROOT)}"
    )
    console.print(grid)
    count = max(1, min(3, len(history) // 2))
    rewards = [item.metrics["reward"] for item in history]
    first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
    words = ("", " two", " three")[count - 1]
    noun = "iterations" if words else "iteration"
    console.print(f"mean reward: {first:.3f} in the first{words} {noun}, {last:.3f} in the last{words}")
    struck = [item for item in history if any(life.incarnation == kill.incarnation for life in item.lives)]
    if not struck:
        console.print("no slot could be killed in time; run the demo again")
    same = bool(struck) and all(compared(run, item.iteration, kill, engine) for item in struck)
    console.print(
        f"run directory: {run}\nDeck:          {run}/{layout.deck(history[-1].iteration)}\nlog:           {log}"
    )
    return Outcome(is_identical=same, has_risen=last > first)


def compared(run: Path, iteration: int, kill: Kill, engine: str) -> bool:
    """Print the comparison of an iteration with an undisturbed rollout; whether all responses are token-identical."""
    identical, total, difference = undisturbed_equals(str(run), iteration)
    console.print(
        f"iteration {iteration}, slot {kill.slot} killed: {identical} of {total} responses token-identical to "
        f"an undisturbed rollout; log-probs differ by at most {difference:.1e}"
    )
    if engine == "torch":
        return identical == total
    torchs, _, difference = undisturbed_equals(str(run), iteration, "torch")
    console.print(
        f"and {torchs} of {total} to an undisturbed rollout by PyTorch's engine; log-probs differ by at most "
        f"{difference:.1e}"
    )
    return identical == torchs == total


def write_settings(path: Path, run: Path, model: Path, engine: str) -> None:
    """Write examples/demo.yaml for this run, model and engine; vLLM runs within the slots' processes to start faster.

    With vLLM, few responses are decoded at once; otherwise the slot whose vLLM starts first would do the work of both
    before the other slot can be killed. Each iteration has slots of its own, so that vLLM's start is in all figures.
    """
    settings: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    settings["run"]["url"] = str(run)
    settings["policy"]["path"] = str(model)
    if engine == "vllm":
        changes = {"crew": "iteration", "engine": "vllm", "vllm": {"process": "same"}, "max_responses_in_flight": 8}
        settings["rollout"] |= changes
    path.write_text(yaml.safe_dump(settings, sort_keys=False))


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny policy on this machine and kill a slot on the way.")
    parser.add_argument("--engine", choices=tuple(ITERATIONS), default="torch")
    parser.add_argument("--iterations", type=int, help="; ".join(f"{n} with {name}" for name, n in ITERATIONS.items()))
    parser.add_argument("--directory", type=Path, default=ROOT / "runs")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    directory: Path = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    make_policy(directory / "demo-model")
    run = Path(tempfile.mkdtemp(prefix=time.strftime("demo-%Y%m%d-%H%M%S-"), dir=directory))
    config, log = run.with_suffix(".yaml"), run.with_suffix(".log")
    write_settings(config, run, directory / "demo-model", arguments.engine)
    iterations = arguments.iterations or ITERATIONS[arguments.engine]
    if arguments.engine == "vllm":
        console.print(f"{iterations} iterations; in each of them every slot is a new process that starts vLLM anew")
        # vLLM logs the same few lines at every start, here and in the slots.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    kill = train(config, run, iterations, log)
    outcome = report(run, kill, log, arguments.engine)
    passed = outcome.is_identical and outcome.has_risen
    console.print(f"{'all good' if passed else 'NOT as promised'}, {time.monotonic() - started_s:.0f} s")
    sys.exit(not passed)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
