"""`make demo`: train a tiny policy by `pyflyte run` on this machine, kill a slot on the way, and lose nothing.

Makes the policy (a short supervised warm start, kept for the next time), runs the workflow, sends SIGKILL to one slot
in the middle of an iteration, compares that iteration with an undisturbed rollout of the same plan, prints a table.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.compare import undisturbed_equals
from examples.warm_start import WarmStart, warm_start
from gleaner import table
from storage import layout, records
from storage.connect import connect
from storage.records import AliveRecord
from storage.run import next_iteration, reports
from storage.store import ObjectMissing, ObjectStore

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "demo.yaml"
ITERATION_KILLED = 2
POLL_INTERVAL_S = 0.02
END_TIME_LIMIT_S = 60.0
console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass
class Kill:
    """The slot this demo kills: chosen once it has written a shard, so that it dies in the middle of responses."""

    slot: int
    done: bool = False
    incarnation: str = ""

    def attempt(self, store: ObjectStore, iteration: int) -> None:
        """Kill the slot's process if it has begun to journal this iteration and has not ended."""
        for key in store.list(layout.alive_all(iteration)):
            try:
                alive = records.read(store, AliveRecord, key)
                store.get(layout.shard(iteration, alive.incarnation, 0), 0, 1)
            except ObjectMissing:
                continue
            if alive.slot == self.slot and alive.state == "working":
                os.kill(alive.pid, signal.SIGKILL)
                self.done, self.incarnation = True, alive.incarnation
                console.print(f"iteration {iteration}: SIGKILL to slot {self.slot} (process {alive.pid})")


def make_policy(directory: Path) -> None:
    """The warm-started policy; about a minute, skipped when an earlier demo made it."""
    if directory.exists():
        console.print(f"policy: {directory} (from an earlier demo)")
        return
    with _progress() as progress:
        bar = progress.add_task("warm start", total=WarmStart.steps)
        warm_start(directory, WarmStart(), lambda step, _: progress.update(bar, completed=step))


def train(config: Path, run: Path, iterations: int, log: Path) -> Kill:
    """Run the workflow as any user would, watch the run's directory, and kill slot 1 in one iteration."""
    command = [
        str(Path(sys.executable).parent / "pyflyte"),
        *("--config", str(ROOT / "flyte.config"), "run", str(ROOT / "workflows" / "training.py"), "training"),
        *("--config", str(config), "--count", str(iterations)),
    ]
    console.print("$ " + " ".join(["pyflyte", *command[1:]]).replace(f"{ROOT}/", ""))
    store, kill = connect(str(run)), Kill(slot=1)
    with log.open("wb") as output, _progress() as progress:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        bar = progress.add_task("iterations", total=iterations)
        try:
            while child.poll() is None:
                done = next_iteration(store)
                progress.update(bar, completed=done)
                if done >= ITERATION_KILLED and not kill.done:
                    kill.attempt(store, done)
                time.sleep(POLL_INTERVAL_S)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait(END_TIME_LIMIT_S)
        progress.update(bar, completed=next_iteration(store))
    if child.returncode:
        console.print(log.read_text(errors="replace")[-4000:])
        sys.exit(f"the workflow failed with exit code {child.returncode}; its log is {log}")
    return kill


def report(run: Path, kill: Kill, log: Path) -> bool:
    """Print what happened; whether the reward rose and the killed iteration is what it would have been."""
    history = reports(connect(str(run)))
    grid = table(history)
    grid.title = "dollars are the seconds of this machine at the listed prices of the pools in examples/demo.yaml"
    console.print(grid)
    first = sum(item.metrics["reward"] for item in history[:3]) / len(history[:3])
    last = sum(item.metrics["reward"] for item in history[-3:]) / len(history[-3:])
    console.print(f"mean reward: {first:.3f} in the first three iterations, {last:.3f} in the last three")
    struck = [item for item in history if any(life.incarnation == kill.incarnation for life in item.lives)]
    same = False
    if not struck:
        console.print("no slot could be killed in time; run the demo again")
    for item in struck:
        identical, total, difference = undisturbed_equals(str(run), item.iteration)
        same = identical == total
        console.print(
            f"iteration {item.iteration}, slot {kill.slot} killed: {identical} of {total} responses token-identical to "
            f"an undisturbed rollout; log-probs differ by at most {difference:.1e}"
        )
    console.print(
        f"run directory: {run}\nDeck:          {run}/{layout.deck(history[-1].iteration)}\nlog:           {log}"
    )
    return same and last > first


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny policy on this machine and kill a slot on the way.")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    directory: Path = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    make_policy(directory / "demo-model")
    run = Path(tempfile.mkdtemp(prefix=time.strftime("demo-%Y%m%d-%H%M%S-"), dir=directory))
    settings = yaml.safe_load(CONFIG.read_text())
    settings["run"]["url"] = str(run)
    settings["policy"]["path"] = str(directory / "demo-model")
    config = run.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    log = run.with_suffix(".log")
    kill = train(config, run, arguments.iterations, log)
    passed = report(run, kill, log)
    console.print(f"{'all good' if passed else 'NOT as promised'}, {time.monotonic() - started_s:.0f} s")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
