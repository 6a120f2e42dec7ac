"""Claim: a trainer killed at random moments ends with the same bits as without kills, and publishes nothing twice.

One run is rolled out and trained without a kill. Copies of it are trained again on its journal, alternately undisturbed
and killed. Train processes are forked from a server that has imported everything: Python's start is not measured.
"""

import argparse
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.reporting import Target, finish
from examples.warm_start import WarmStart, warm_start
from storage.clock import SystemClock
from storage.journal.compaction import read_batches
from storage.records import layout, records
from storage.records.records import TrainingRecord
from storage.records.run import exists
from storage.stores.connect import connect
from storage.stores.local import TEMPORARY
from storage.stores.store import ObjectStore
from storage.weights import tensor_sets
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.versions import pull_version
from tasks.configuration.data import ArithmeticConfig
from tasks.configuration.run_config import RunConfig, parse
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.session.member import generate_slot

EXECUTION = "benchmark"
PRELOAD = ["tasks.learning.train_iteration", "tasks.sampling.engines.torch_engine", "examples.warm_start"]
POLL_INTERVAL_S = 0.001
SEED = 7  # for the kills; those of run k are drawn with SEED + k
# In these few steps, sums modulo 2 are learned by half, so groups have mixed rewards and gradients are not zero.
TASK = ArithmeticConfig(items_max=5)
WARM_START = WarmStart(steps=120, batch=16, learning_rate=3e-3, task=TASK)
# With these settings, a step depends on everything in a checkpoint: the moments and the schedule's position.
OPTIMIZER = {"learning_rate": 1e-3, "weight_decay": 0.01, "warmup_steps": 2, "schedule": "linear", "total_steps": 8}
BEGUN = re.compile(r"^micro-batch (\d+): ", re.MULTILINE)
PUBLISHED = re.compile(r"^published weight version \d+$", re.MULTILINE)
# In the phase "checkpoint" the weights are published; in "exit" the checkpoint is complete.
PHASES = ("start", "micro-batches", "optimizer step", "publication", "checkpoint", "exit")
ARMS = ("undisturbed", "killed")


@dataclass(frozen=True)
class Pace:
    """The times of a life without a kill: seconds until each micro-batch, the first of the weights, the checkpoint."""

    begun_s: tuple[float, ...]
    publishing_s: float
    saved_s: float


@dataclass(frozen=True)
class Kill:
    """A kill at `share` of the time until the checkpoint, or (at_end) of that from the first of the weights to it."""

    at_end: bool
    share: float


@dataclass(frozen=True)
class Life:
    """One process life: its duration, the micro-batches it trained on, and how many of these were recorded before.

    published: how often it logged that it published. phase: the one of PHASES in which it was killed, or None.
    """

    duration_s: float
    trained: int
    replayed: int
    published: int
    phase: str | None


@dataclass(frozen=True)
class Origin:
    """The run that is copied, trained to its end; `snapshots[k]` adds the rolled-out iteration k to a copy."""

    store: ObjectStore
    snapshots: list[Path]


def train_process(run_url: str, iteration: int, log_path: str) -> None:
    """The body of a train process: what the train task runs, with its log in a file that survives the process."""
    # Killed processes leave copies of the model, which are deleted with the benchmark's folder.
    tempfile.tempdir = str(Path(log_path).parent)
    logger = logging.getLogger("tasks.learning")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.FileHandler(log_path))
    train_iteration(run_url, iteration, EXECUTION, SystemClock())


def draw_kills(rng: random.Random, kills: int) -> list[Kill]:
    """Draw the kills of one iteration's lives at uniform moments, in random order; every third is at the step's end."""
    drawn = [Kill(at_end=number % 3 == 0, share=rng.random()) for number in range(kills)]
    rng.shuffle(drawn)
    return drawn


def due_s(kill: Kill, expected: Pace, begun_s: Sequence[float]) -> float | None:
    """The second of its life at which to kill a process whose micro-batches began at `begun_s`; None: not known yet."""
    if not kill.at_end:
        return kill.share * expected.saved_s
    if len(begun_s) < len(expected.begun_s):
        return None
    late_s = begun_s[-1] - expected.begun_s[-1]
    return late_s + expected.publishing_s + kill.share * (expected.saved_s - expected.publishing_s)


class Trainers:
    """Starts train processes, one at a time, and kills some."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir()
        self._started = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        # A first process starts the server, so that no measured process waits for the server's imports.
        process = self._context.Process(target=os.getpid)
        process.start()
        process.join()

    def live(self, run: Path, iteration: int, kill: Kill | None, expected: Pace | None) -> tuple[Life, Pace]:
        """Run one life, killed unless it ends before, and return it with its pace; RuntimeError if it fails."""
        recorded = len(read_batches(connect(str(run)), iteration))
        folder, checkpoint = run / layout.weights(iteration + 1), layout.checkpoint(iteration + 1)
        left = files_below(folder)
        log = self._folder / f"{self._started:05d}.log"
        log.touch()
        self._started += 1
        process = self._context.Process(target=train_process, args=(str(run), iteration, str(log)))
        begun_s: list[float] = []
        publishing_s, saved_s, alive, at_s = 0.0, 0.0, True, None
        started_s = time.monotonic()
        process.start()
        while alive:
            alive = process.is_alive()
            text, now_s = log.read_text(), time.monotonic() - started_s
            begun_s += [now_s] * (len(BEGUN.findall(text)) - len(begun_s))
            publishing_s = publishing_s or now_s * folder.exists()
            saved_s = saved_s or now_s * (run / layout.manifest(checkpoint)).exists()
            at_s = due_s(kill, expected, begun_s) if kill and expected else None
            if at_s is not None and now_s >= at_s:
                process.kill()
                process.join()
            time.sleep(POLL_INTERVAL_S if alive else 0.0)
        process.join()
        duration_s, phase = time.monotonic() - started_s, None
        if process.exitcode == -signal.SIGKILL and at_s is not None and expected:
            phase = phase_of(run, iteration, len(begun_s) / len(expected.begun_s), left)
        elif process.exitcode != 0:
            raise RuntimeError(f"training of iteration {iteration} ended with exit code {process.exitcode}")
        numbers = [int(number) for number in BEGUN.findall(text)]
        replayed = sum(number < recorded for number in numbers)
        life = Life(duration_s, len(numbers), replayed, len(PUBLISHED.findall(text)), phase)
        return life, Pace(tuple(begun_s), publishing_s, saved_s)


def phase_of(run: Path, iteration: int, begun_share: float, left: set[str]) -> str:
    """The phase in which a life was killed after this share of micro-batches; `left`: files of weights from before."""
    store, version = connect(str(run)), iteration + 1
    # Files are listed before keys, because a store's listing removes what dead processes have left.
    files = files_below(run / layout.weights(version))
    if exists(store, layout.manifest(layout.checkpoint(version))):
        return "exit"
    if exists(store, layout.manifest(layout.weights(version))):
        return "checkpoint"
    if files != left:
        return "publication"
    if begun_share == 1:
        return "optimizer step"
    return "micro-batches" if begun_share else "start"


def make_config(folder: Path, model: Path, prompts: int) -> RunConfig:
    """A run with small micro-batches and a reference policy."""
    document = {
        "run": {"url": str(folder), "seed": 11, "num_prompts_per_step": prompts, "num_generations": 4},
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "arithmetic": {"items_max": TASK.items_max}},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": 64},
        "rollout": {"engine": "torch", "context_length": 96, "flush_interval_s": 0.05, "idle_timeout_s": 0.0},
        "algorithm": {"kl_coef": 0.02},
        "optimizer": OPTIMIZER,
        "trainer": {"group_timeout_s": 60.0, "micro_batch_tokens_max": 256},
        "pools": {"rollout": {"count": 1, "interruptible": True}},
    }
    return parse(document)


def make_origin(folder: Path, config: RunConfig, trainers: Trainers, iterations: int) -> tuple[Origin, list[Pace]]:
    """Plan, roll out in this process, train in another one and conclude each iteration; also returns each pace."""
    run, clock = Path(config.run.url), SystemClock()
    origin = Origin(connect(config.run.url), [folder / f"snapshot-{k}" for k in range(iterations)])
    paces = []
    for iteration, snapshot in enumerate(origin.snapshots):
        _, [slots] = prepare(config, EXECUTION, clock)
        for slot in slots:
            generate_slot(config.run.url, iteration, slot, lambda: False, clock)
        added = layout.iteration(iteration) if iteration else ""
        shutil.copytree(run / added, snapshot / added)
        paces.append(trainers.live(run, iteration, None, None)[1])
        conclude_iteration(origin.store, iteration, {"rollout": 0.0, "train": 0.0}, clock)
    return origin, paces


def train_copy(
    trainers: Trainers, origin: Origin, run: Path, kills: Sequence[Sequence[Kill]], paces: list[Pace]
) -> dict[str, Any]:
    """Train a copy made at `run`, with the kills kills[k] in iteration k, and compare it with the origin.

    paces: the expected pace of each iteration, replaced by the pace measured in an iteration without kills. At the end
    of each iteration, a late attempt runs, which must not write.
    """
    lives: list[Life] = []
    written_again: list[str] = []
    published_twice = 0
    for iteration, snapshot in enumerate(origin.snapshots):
        shutil.copytree(snapshot, run, dirs_exist_ok=True)
        before, first = stamps(run), len(lives)
        for kill in [*kills[iteration], None]:
            life, pace = trainers.live(run, iteration, kill, paces[iteration])
            lives.append(life)
            after = stamps(run)
            written_again += [key for key, stamp in before.items() if after.get(key) != stamp]
            before = after
            if life.phase is None:
                break
        if not kills[iteration]:
            paces[iteration] = pace
        train_iteration(str(run), iteration, EXECUTION, SystemClock())
        written_again += [key for key, _ in stamps(run).items() ^ before.items()]
        published_twice += max(0, sum(life.published for life in lives[first:]) - 1)
    return {
        "seconds": sum(life.duration_s for life in lives),
        "kills": [life.phase for life in lives if life.phase is not None],
        "trained": sum(life.trained for life in lives),
        "replayed": sum(life.replayed for life in lives),
        "published_twice": published_twice,
        "written_again": written_again,
        **likeness(connect(str(run)), origin.store, len(origin.snapshots)),
    }


def files_below(folder: Path) -> set[str]:
    """The files below a folder, including temporary ones; none if it does not exist."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def stamps(run: Path) -> dict[str, tuple[int, int]]:
    """The inode and time of writing of each object in a run's directory by key, except the lease."""
    keys = [key for key in files_below(run) if TEMPORARY not in key and not key.startswith(layout.LEASE)]
    return {key: ((status := (run / key).stat()).st_ino, status.st_mtime_ns) for key in keys}


def unnamed_objects(store: ObjectStore, version: int) -> list[str]:
    """Objects of a version's weights and checkpoint that no manifest names, which hold other tensors."""
    found: list[str] = []
    for prefix in (layout.weights(version), layout.checkpoint(version)):
        keys = set(store.list(prefix))
        manifests = keys & {layout.manifest(prefix), layout.delta_manifest(prefix)}
        objects = [name for key in manifests for name in records.read(store, Manifest, key).objects]
        found += sorted(keys - manifests - {layout.tensor_object(prefix, name) for name in objects})
    return found


def tensors_of(store: ObjectStore, version: int) -> dict[str, TensorBlock]:
    """The weights of a version, and from its checkpoint the float32 parameters and the moments."""
    _, published = pull_version(store, version, None, SystemClock())
    _, saved = tensor_sets.pull(store, layout.checkpoint(version))
    return {f"published.{name}": block for name, block in published.items()} | saved


def records_of(store: ObjectStore, iteration: int) -> list[Any]:
    """The parts of the records that must be equal: micro-batches, metrics of learning, and the trainer's state."""
    metrics = records.read(store, TrainingRecord, layout.training(iteration)).metrics
    learned = {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "requests/"))}
    state = tensor_sets.read_manifest(store, layout.checkpoint(iteration + 1)).metadata["trainer_state"]
    return [*(replace(batch, nonce="") for batch in read_batches(store, iteration)), learned, state]


def equal_tensors(left: dict[str, TensorBlock], right: dict[str, TensorBlock]) -> int:
    """The number of tensors that are bit-identical in both."""
    both = [(left[name], right[name]) for name in left.keys() & right.keys()]
    return sum((a.dtype, a.shape, bytes(a.data)) == (b.dtype, b.shape, bytes(b.data)) for a, b in both)


def likeness(store: ObjectStore, origin: ObjectStore, iterations: int) -> dict[str, Any]:
    """Compare all results of the trainer in a copy with those in the run that was copied."""
    pairs = [(tensors_of(origin, k), tensors_of(store, k)) for k in range(1, iterations + 1)]
    return {
        "tensors": sum(len(expected.keys() | found.keys()) for expected, found in pairs),
        "equal": sum(equal_tensors(expected, found) for expected, found in pairs),
        "records_equal": all(records_of(origin, k) == records_of(store, k) for k in range(iterations)),
        "unnamed": [key for version in range(1, iterations + 1) for key in unnamed_objects(store, version)],
    }


def moved_share(store: ObjectStore, iterations: int) -> float:
    """The share of the weights' tensors that a step changed."""
    versions = [pull_version(store, version, None, SystemClock())[1] for version in range(iterations + 1)]
    return 1 - sum(equal_tensors(old, new) for old, new in pairwise(versions)) / (iterations * len(versions[0]))


def report(rounds: list[dict[str, dict[str, Any]]], moved: float, notes: dict[str, int], *, as_json: bool) -> None:
    """Print table, targets and JSON. moved: the share of tensors that the steps changed."""
    calm, killed = ([one[arm] for one in rounds] for arm in ARMS)
    both = [*calm, *killed]

    def same(copies: list[dict[str, Any]]) -> int:
        return sum(one["equal"] == one["tensors"] and one["records_equal"] for one in copies)

    phases = Counter(phase for one in killed for phase in one["kills"])
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(calm, killed, strict=True)]
    lost = sum(ratio - 1 for ratio in ratios) * notes["iterations"] / max(1, phases.total())
    rows = [
        {
            "arm": arm,
            "runs bit-equal": f"{same(copies)} of {len(copies)}",
            "tensors bit-equal": f"{sum(one['equal'] for one in copies)} of {sum(one['tensors'] for one in copies)}",
            "wall clock / undisturbed": statistics.median(ratio),
            "kills": sum(len(one["kills"]) for one in copies),
            "micro-batches trained": sum(one["trained"] for one in copies),
            "replayed from records": sum(one["replayed"] for one in copies),
        }
        for arm, copies, ratio in zip(ARMS, (calm, killed), ([1.0], ratios), strict=True)
    ]
    targets = [
        Target("killed_runs_bit_equal", same(killed), f">= {len(rounds)}"),
        Target("undisturbed_runs_bit_equal", same(calm), f">= {len(rounds)}"),
        Target("published_twice", sum(one["published_twice"] for one in both), "<= 0"),
        Target("objects_written_again", sum(len(one["written_again"]) for one in both), "<= 0"),
        Target("objects_that_no_manifest_names", sum(len(one["unnamed"]) for one in both), "<= 0"),
        Target("kills", phases.total(), f">= {len(rounds)}"),
        Target("kills_at_checkpoint_or_publication", phases["checkpoint"] + phases["publication"], ">= 1"),
        Target("share_of_tensors_changed_by_the_steps", moved, ">= 1"),
    ]
    results = {
        "kills_by_phase": {phase: phases[phase] for phase in PHASES},
        "iterations_lost_per_kill": round(lost, 3),
        "wall_clock_ratios": [round(ratio, 3) for ratio in ratios],
        "undisturbed_s": round(statistics.median(one["seconds"] for one in calm), 3),
        "faults": {name: sorted({key for one in both for key in one[name]}) for name in ("written_again", "unnamed")},
    }
    print("kills at: " + ", ".join(f"{phase} {phases[phase]}" for phase in PHASES))
    print(f"a kill costs {lost:.2f} of an iteration's training")
    finish("resume_training", rows, targets, as_json=as_json, notes=notes, results=results)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3, help="per iteration, at most")
    parser.add_argument("--prompts", type=int, default=16)
    given = parser.parse_args()
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        warm_start(folder / "model", WARM_START, lambda _step, _loss: None)
        trainers = Trainers(folder / "logs")
        config = make_config(folder / "origin", folder / "model", given.prompts)
        origin, paces = make_origin(folder, config, trainers, given.iterations)
        batches = sum(len(pace.begun_s) for pace in paces)
        for number in range(given.runs):
            rng, copies = random.Random(SEED + number), {}
            counts = {"undisturbed": 0, "killed": given.kills}
            kills = {arm: [draw_kills(rng, counts[arm]) for _ in range(given.iterations)] for arm in ARMS}
            # The arms take turns at being first.
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                copies[arm] = train_copy(trainers, origin, folder / f"{number}-{arm}", kills[arm], paces)
            rounds.append(copies)
        moved = moved_share(origin.store, given.iterations)
    notes = {"iterations": given.iterations, "kills_per_iteration_max": given.kills, "micro_batches": batches}
    report(rounds, moved, notes, as_json=given.json)


if __name__ == "__main__":
    main()
