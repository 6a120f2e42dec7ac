"""The learning curve of an arm: a run trains one iteration at a time in this process, each version is evaluated."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning_run import EXECUTION, Run
from storage.clock import SystemClock
from storage.records.run import release_lease
from storage.stores.connect import connect
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.session.member import generate_slot


@dataclass(frozen=True)
class Curve:
    """What an arm of one seed learned.

    Attributes:
        held_out: The held-out reward of each weight version, the first policy's included.
        metrics: The metrics of each iteration, without those that have no value.
    """

    held_out: Sequence[float]
    metrics: Sequence[Mapping[str, float]]

    @property
    def last(self) -> float:
        return self.held_out[-1]

    @property
    def gain(self) -> float:
        """The last version's held-out reward over the first policy's."""
        return self.last - self.held_out[0]


def iterate(run: Run) -> dict[str, float]:
    """Plan, roll out where a policy samples, train and conclude an iteration in this process; returns its metrics."""
    clock = SystemClock()
    reference, pools = prepare(run.config, EXECUTION, clock)
    url, iteration = reference.run_url, reference.iteration
    for slot in (slot for slots in pools for slot in slots):
        generate_slot(url, iteration, slot, lambda: False, clock)
    train_iteration(url, iteration, EXECUTION, clock)
    report = conclude_iteration(connect(url), iteration, {"rollout": 0.0, "train": 0.0}, clock)
    return {name: value for name, value in report.metrics.items() if value is not None}


def learn(run: Run, model: Path, iterations: int) -> Curve:
    """The curve of a new run after so many iterations. model: the directory of the first policy."""
    held_out, metrics = [], []
    for version in range(iterations):
        metrics.append(iterate(run))
        held_out.append(run.evaluate(version + 1, model))
    # Version 0 is published with the first plan.
    before = run.evaluate(0, model)
    release_lease(connect(run.config.run.url), EXECUTION)
    return Curve([before, *held_out], metrics)


def rows(curves: Mapping[str, Sequence[Curve]]) -> Iterator[dict[str, Any]]:
    """The table's row of each arm: the mean over its seeds of each version's held-out reward."""
    for name, each in curves.items():
        versions = zip(*(curve.held_out for curve in each), strict=True)
        yield {"arm": name} | {f"version {n}": round(statistics.fmean(of), 3) for n, of in enumerate(versions)}
