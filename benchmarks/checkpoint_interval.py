"""Claim: a checkpoint every k iterations writes 1 / k of the bytes, with the same bits; `auto` chooses well when.

Run: python -m benchmarks.checkpoint_interval --json. The arms are runs of one random Qwen2 in bfloat16 that differ in
`trainer.checkpoint_interval` alone, in a local directory of their own, iteration by iteration in turns. Each iteration
is trained by `advance`, which restores its state from storage as the train task of a pod does, so each one replays what
its checkpoint lacks: with interval k, (k - 1) / 2 train phases on average. Members make tokens without a model.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reporting import Target, finish
from benchmarks.weight_steps import make_random_policy
from storage import layout
from storage.clock import SystemClock
from storage.connect import connect
from storage.store import ObjectStore
from storage.weights.manifest import Manifest
from storage.weights.tensor_sets import read_manifest
from tasks.configuration.run_config import RunConfig, parse
from tasks.learning.advance import advance
from tasks.preparing.iteration import prepare
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.session.member import generate_slot

EXECUTION = "benchmark"
INTERVALS: tuple[int | str, ...] = (1, 2, 5, 10, "auto")
ITERATIONS = 10
HIDDEN, LAYERS, PROMPTS = 256, 4, 8
CHECKPOINT_MIB = "checkpoints, MiB per iteration"
# A rate of 1e-6 as in fine-tuning, at which few of the bytes of bfloat16 weights change.
OPTIMIZER = {"learning_rate": 1e-6, "weight_decay": 0.01}
SHORTER = [{"function": "length", "free_tokens": 0, "scale_tokens": 40}]


@dataclass
class Arm:
    """A run with one interval: bytes of its checkpoints and weights, and seconds and replays of each iteration."""

    interval: int | str
    config: RunConfig
    publish_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    restore_s: list[float] = field(default_factory=list)
    replay_s: list[float] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)

    @property
    def store(self) -> ObjectStore:
        return connect(self.config.run.url)

    def iterate(self, iteration: int) -> None:
        """Plan, roll out, train and conclude an iteration. Nothing is swept, so that all that was written is there."""
        url, clock = self.config.run.url, SystemClock()
        _, [slots] = prepare(self.config, EXECUTION, clock)
        for slot in slots:
            generate_slot(url, iteration, slot, lambda: False, clock)
        metrics = advance(url, iteration, EXECUTION, clock).metrics
        report = conclude_iteration(self.store, iteration, {"rollout": 0.0, "train": 0.0}, clock)
        self.publish_s.append(report.metrics["timing_s/publish"])
        self.compute_s.append(metrics["timing_s/compute"])
        self.restore_s.append(metrics["timing_s/restore"])
        self.replay_s.append(metrics.get("timing_s/replay", 0.0))
        self.replays.append(int(metrics.get("replay/iterations", 0.0)))

    def bytes_below(self, prefix: str, from_version: int = 1) -> int:
        """The bytes of the complete tensor sets below layout.CHECKPOINTS or layout.WEIGHTS."""
        keys = [key for key in self.store.list(prefix) if key.endswith("/manifest.json")]
        manifests = {key: read_manifest(self.store, key.removesuffix("manifest.json")) for key in keys}
        return sum(_bytes(manifest) for key, manifest in manifests.items() if int(key.split("/")[1]) >= from_version)

    def digests(self, iterations: int) -> list[dict[str, str]]:
        """Of each weight version, its tensors by their digests."""
        found = [read_manifest(self.store, layout.weights(version)) for version in range(iterations + 1)]
        return [{name: entry.digest for name, entry in manifest.tensors.items()} for manifest in found]

    def row(self, iterations: int) -> dict[str, Any]:
        mib = 2.0**20 * iterations
        return {
            "interval": self.interval,
            CHECKPOINT_MIB: self.bytes_below(layout.CHECKPOINTS) / mib,
            "weights, MiB per iteration": self.bytes_below(layout.WEIGHTS) / mib,
            "publish, s per iteration": statistics.fmean(self.publish_s),
            "restore, s per iteration": statistics.fmean(self.restore_s),
            "replayed iterations": sum(self.replays),
            "replay, s per iteration": statistics.fmean(self.replay_s),
            "train phase, s": statistics.median(self.compute_s),
        }


def _bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.objects.values())


def run_of(folder: Path, model: Path, interval: int | str, prompts: int) -> RunConfig:
    """The configuration of an arm."""
    document = {
        "run": {"url": str(folder), "seed": 11, "num_prompts_per_step": prompts, "num_generations": 4},
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "size": 64},
        "rewards": SHORTER,
        "sampling": {"max_completion_length": 64},
        "rollout": {"engine": "scripted", "context_length": 128, "idle_timeout_s": 0.0, "weight_cache_bytes_max": 0},
        "optimizer": OPTIMIZER,
        "trainer": {"poll_interval_s": 0.01, "micro_batch_tokens_max": 2048, "checkpoint_interval": interval},
        "pools": {"rollout": {"count": 1, "interruptible": True}},
    }
    return parse(document)


def run(
    folder: Path, intervals: Sequence[int | str], iterations: int, *, hidden: int, layers: int, prompts: int
) -> list[dict[str, Any]]:
    """A row for each arm; all arms go from iteration to iteration in turns.

    Raises AssertionError if the arms differ in a bit of a weight version, or if two versions do not.
    """
    model = make_random_policy(folder / "model", hidden=hidden, layers=layers)
    arms = [Arm(each, run_of(folder / f"every-{each}", model, each, prompts)) for each in intervals]
    for iteration in range(iterations):
        for arm in arms:
            arm.iterate(iteration)
    first, *others = [arm.digests(iterations) for arm in arms]
    assert len({str(version) for version in first}) == iterations + 1, "an iteration has changed no weight"
    assert all(other == first for other in others), "the arms have other bits"
    return [arm.row(iterations) for arm in arms]


def targets_of(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """Each arm writes the bytes of the first one's checkpoints, divided by its interval; `auto` takes little time.

    The time is that of writing and replaying, against the best fixed interval, which is known afterwards.
    """
    first = rows[0][CHECKPOINT_MIB]
    fixed, auto = ([row for row in rows if (row["interval"] == "auto") is chosen] for chosen in (False, True))
    weighed = [
        Target("seconds with auto over those with the best interval", _lost_s(row) / min(map(_lost_s, fixed)), "<= 2")
        for row in auto
    ]
    return weighed + [
        Target(
            f"checkpoint bytes with interval {row['interval']}, times it, over those with {rows[0]['interval']}",
            row[CHECKPOINT_MIB] * row["interval"] / first,
            "<= 1.01",
        )
        for row in fixed[1:]
    ]


def _lost_s(row: dict[str, Any]) -> float:
    return float(row["publish, s per iteration"] + row["replay, s per iteration"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gleaner-benchmark-") as folder:
        rows = run(Path(folder), INTERVALS, given.iterations, hidden=given.hidden, layers=LAYERS, prompts=PROMPTS)
    notes = {"iterations": given.iterations, "hidden": given.hidden, "layers": LAYERS}
    finish("checkpoint_interval", rows, targets_of(rows), as_json=given.json, notes=notes)


if __name__ == "__main__":
    main()
