"""The start-up cost of a container: seconds and memory of every task before its first useful work, as Flyte runs it.

Each round runs one small iteration of a tiny policy on an S3 server: the tasks in order, each in a process of its own,
and flytekit alone. With --against, another checkout does the same in turns and is compared.
"""

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.reporting import Target, finish, ratios
from benchmarks.start_containers import (
    BUCKET,
    EXECUTION,
    Bucket,
    Container,
    conclude_of,
    iterations_of,
    noting_server,
    plan_of,
    rollout_of,
    run_container,
    run_process,
    train_of,
)
from examples.warm_start import build_model, build_tokenizer
from storage.records import layout
from tasks.configuration.references import PlanReference

HERE = Path(__file__).resolve().parents[1]
FLYTEKIT = "flytekit alone"
NEW, NEXT = "plan, new run", "plan, next iteration"
# The bounds of this checkout, in multiples of importing flytekit alone: seconds and peak MB. torch alone adds 2.4.
BOUNDS = {"iterations": (3, 2.2), NEW: (6, 3.5), NEXT: (6, 3.5), "conclude": (4, 3.5)}


@dataclass(frozen=True, kw_only=True)
class Start:
    """The costs of a process.

    read_s: seconds from its start to its first request to the run's directory; None if it makes none. work_s: seconds
    to its first useful work. cpu_s: processor seconds of its whole life. peak_mb: its peak memory, or a child's if that
    is larger.
    """

    read_s: float | None
    work_s: float
    cpu_s: float
    peak_mb: float


Starts = dict[str, list[Start]]


def config_of(url: str, model: Path) -> dict[str, Any]:
    """The configuration of a run with four short responses on one slot, which are flushed at once."""
    return {
        "run": {"url": url, "seed": 3, "num_prompts_per_step": 2, "num_generations": 2},
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "limit": 8},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": 24},
        "rollout": {"engine": "torch", "context_length": 96, "flush_interval_s": 0.1, "weight_cache_bytes_max": 0},
        "pools": {"rollout": {"count": 1}},
    }


def one_iteration(run: str, model: Path) -> dict[str, tuple[Container, str]]:
    """The containers of a run's first iteration and next plan, in order, each with the PUT that is its first work.

    The first work of `iterations` is its result; that of a new run's plan is its first object, whichever that is.
    """
    config = config_of(f"s3://{BUCKET}/{run}", model)
    reference = PlanReference(run_url=config["run"]["url"], iteration=0, weight_version=0, execution=EXECUTION)
    return {
        "iterations": (iterations_of(config), r".*/out/futures\.pb"),
        NEW: (plan_of(config), f".*/{run}/"),
        "rollout": (rollout_of(reference), f".*/{layout.journal(0)}"),
        "train": (train_of(reference), f".*/{layout.batches(0)}"),
        "conclude": (conclude_of(reference), f".*/{layout.report(0)}"),
        NEXT: (plan_of(config), f".*/{layout.plan(1)}"),
    }


def go_through(bucket: Bucket, turn: int, model: Path, trees: Mapping[str, Path]) -> Iterator[tuple[str, str, Start]]:
    """Yield (checkout, process, its start) for flytekit alone and for every container of `one_iteration`.

    Every checkout has a run of its own. They take turns at each process, and `turn` decides which is first.
    """
    labels = list(trees)
    labels = labels[turn % len(labels) :] + labels[: turn % len(labels)]
    for label in labels:
        alone = run_process(bucket, [sys.executable, "-c", "import flytekit"], trees[label], {})
        yield label, FLYTEKIT, Start(read_s=None, work_s=alone.wall_s, cpu_s=alone.cpu_s, peak_mb=alone.peak_mb)
    runs = {label: f"{label}-{turn}-run" for label in labels}
    tasks = {label: one_iteration(run, model) for label, run in runs.items()}
    for task, label in product(tasks[labels[0]], labels):
        container, work = tasks[label][task]
        life = run_container(bucket, container, f"{label}-{turn}-flyte/{task.replace(' ', '-')}", trees[label])
        work_s = life.until(f"PUT {work}")
        if work_s is None:
            raise RuntimeError(f"{task} wrote nothing that matches {work}")
        read_s = life.until(f".*{runs[label]}")
        yield label, task, Start(read_s=read_s, work_s=work_s, cpu_s=life.cpu_s, peak_mb=life.peak_mb)


def measure(trees: Mapping[str, Path], rounds: int) -> dict[str, Starts]:
    """The costs of each checkout's processes, in the order of the rounds."""
    measured: dict[str, Starts] = {label: defaultdict(list) for label in trees}
    with tempfile.TemporaryDirectory(prefix="gleaner-start-") as temporary, noting_server() as bucket:
        model = Path(temporary)
        tokenizer = build_tokenizer()
        build_model(len(tokenizer)).save_pretrained(model)
        tokenizer.save_pretrained(model)
        for turn in range(rounds):
            for label, process, start in go_through(bucket, turn, model, trees):
                measured[label][process].append(start)
    return measured


def median(starts: Sequence[Start], of: Callable[[Start], float]) -> float:
    return statistics.median(map(of, starts))


def row(label: str, task: str, starts: Sequence[Start]) -> dict[str, Any]:
    """A table row: medians over the rounds, and the range."""
    works = [start.work_s for start in starts]
    reads = [start.read_s for start in starts if start.read_s is not None]
    return {
        "checkout": label,
        "process": task,
        "first read s": statistics.median(reads) if reads else "",
        "first work s": statistics.median(works),
        "from .. to": f"{min(works):.2f} .. {max(works):.2f}",
        "CPU s to its end": median(starts, lambda start: start.cpu_s),
        "peak MB": median(starts, lambda start: start.peak_mb),
    }


def targets_of(measured: Mapping[str, Starts]) -> list[Target]:
    """The targets of this checkout against flytekit alone, and against the other checkout if there is one."""

    def works_s(label: str, task: str) -> list[float]:
        return [start.work_s for start in measured[label][task]]

    def peaks_mb(task: str) -> list[float]:
        return [start.peak_mb for start in measured["this"][task]]

    found = []
    for task, (seconds, peaks) in BOUNDS.items():
        name = task.replace(", ", "_").replace(" ", "_")
        found += [
            ratios(works_s("this", task), works_s("this", FLYTEKIT)).target(f"{name}_over_flytekit", f"<= {seconds}"),
            ratios(peaks_mb(task), peaks_mb(FLYTEKIT)).target(f"{name}_peak_over_flytekit", f"<= {peaks}"),
        ]
        if "other" in measured and task != "conclude":
            over_other = ratios(works_s("this", task), works_s("other", task))
            found.append(over_other.target(f"{name}_over_other", "<= 0.5"))
    return found


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--against", type=Path, help="another checkout whose tasks have the same inputs, compared in turns"
    )
    given = parser.parse_args()
    trees = {"this": HERE} | ({"other": given.against.resolve()} if given.against else {})
    measured = measure(trees, given.rounds)
    rows = [row(label, task, starts) for label, tasks in measured.items() for task, starts in tasks.items()]
    finish("start", rows, targets_of(measured), as_json=given.json, notes={"rounds": given.rounds})


if __name__ == "__main__":
    main()
