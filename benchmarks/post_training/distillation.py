"""Claim: a larger teacher raises the held-out reward faster than rewards alone, with equally many responses.

The demo's task, a policy that was warm-started on noisy steps, and a teacher of three times its parameters, trained on
right steps. Every arm of a seed begins with the same policy, prompts and noise, and takes the same number of steps.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning_run import EXECUTION, TASK, WARM_START, Run, make_run
from benchmarks.post_training.part import Outcome
from benchmarks.reporting import Target
from examples.warm_start import WarmStart, warm_start
from storage.clock import SystemClock
from storage.records.run import release_lease
from storage.stores.connect import connect
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.session.member import generate_slot

ITERATIONS = 6
TEACHER = WarmStart(
    steps=700, batch=32, learning_rate=1e-3, seed=2, task=TASK, step_noise=0.0, hidden_size=192, layers=3
)
ALONE = "grpo"


def arms(teacher: Path) -> dict[str, dict[str, Any]]:
    """The sections of each arm beside those of `make_run`, by the arm's name."""
    sampled = {"path": str(teacher)}
    return {
        ALONE: {},
        "teacher, sampled tokens": {"rewards": [], "teacher": sampled},
        "teacher, heads": {"rewards": [], "teacher": sampled | {"top_k": 8}},
    }


def iterate(run: Run) -> dict[str, float]:
    """Plan, roll out, train and conclude an iteration in this process; returns its metrics."""
    clock = SystemClock()
    reference, [slots] = prepare(run.config, EXECUTION, clock)
    url, iteration = reference.run_url, reference.iteration
    for slot in slots:
        generate_slot(url, iteration, slot, lambda: False, clock)
    train_iteration(url, iteration, EXECUTION, clock)
    report = conclude_iteration(connect(url), iteration, {"rollout": 0.0, "train": 0.0}, clock)
    return {name: value for name, value in report.metrics.items() if value is not None}


def run_arm(folder: Path, model: Path, seed: int, sections: dict[str, Any]) -> dict[str, Any]:
    """The held-out reward of each weight version, and the KL to the teacher in each iteration."""
    run = make_run(folder, model, seed, killed=False, **sections)
    held_out, kl = [], []
    for version in range(ITERATIONS):
        metrics = iterate(run)
        held_out.append(run.evaluate(version + 1, model))
        kl.append(metrics.get("teacher/kl"))
    before = run.evaluate(0, model)
    release_lease(connect(run.config.run.url), EXECUTION)
    return {"held_out": [before, *held_out], "teacher_kl": kl}


def measure(folder: Path, seeds: Sequence[int]) -> Outcome:
    """Train policy and teacher, then run the arms of each seed."""
    model, teacher = folder / "model", folder / "teacher"
    warm_start(model, WARM_START, lambda _step, _loss: None)
    warm_start(teacher, TEACHER, lambda _step, _loss: None)
    given = arms(teacher)
    curves = {
        name: [run_arm(folder / f"arm-{number}", model, seed, sections) for seed in seeds]
        for number, (name, sections) in enumerate(given.items())
    }
    # What may be reached is measured as for a run's versions.
    reached = make_run(folder / "reached", teacher, 0, killed=False)
    prepare(reached.config, EXECUTION, SystemClock())
    rows: list[dict[str, Any]] = []
    for name, runs in curves.items():
        columns = zip(*(run["held_out"] for run in runs), strict=True)
        rows.append(
            {"arm": name}
            | {f"version {version}": round(statistics.fmean(each), 3) for version, each in enumerate(columns)}
        )
    targets = []
    for name in list(given)[1:]:
        gains = [
            taught["held_out"][-1] - alone["held_out"][-1]
            for taught, alone in zip(curves[name], curves[ALONE], strict=True)
        ]
        label = name.replace(", ", "_").replace(" ", "_")
        targets.append(Target(f"{label}_over_grpo_mean", statistics.fmean(gains), "> 0.02"))
        targets.append(Target(f"{label}_seeds_over_grpo", sum(gain > 0 for gain in gains), f">= {len(gains)}"))
    return Outcome(rows, targets, {"curves": curves, "teacher": reached.evaluate(0, teacher)})
