"""Claim: a larger teacher raises the held-out reward faster than rewards alone, with equally many responses.

The demo's task, a policy that was warm-started on noisy steps, and a teacher of three times its parameters, trained on
right steps. Every arm of a seed begins with the same policy, prompts and noise, and takes the same number of steps.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.learning_run import EXECUTION, TASK, WARM_START, make_run
from benchmarks.post_training.curve import Curve, learn, rows
from benchmarks.post_training.part import Outcome
from benchmarks.reporting import Target
from examples.warm_start import WarmStart, warm_start
from storage.clock import SystemClock
from tasks.preparing.iteration import prepare

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


def run_arm(folder: Path, model: Path, seed: int, sections: dict[str, Any]) -> Curve:
    """The curve of an arm with one seed."""
    return learn(make_run(folder, model, seed, killed=False, **sections), model, ITERATIONS)


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
    targets = []
    for name in list(given)[1:]:
        gains = [taught.last - alone.last for taught, alone in zip(curves[name], curves[ALONE], strict=True)]
        label = name.replace(", ", "_").replace(" ", "_")
        targets.append(Target(f"{label}_over_grpo_mean", statistics.fmean(gains), "> 0.02"))
        targets.append(Target(f"{label}_seeds_over_grpo", sum(gain > 0 for gain in gains), f">= {len(gains)}"))
    results = {name: [asdict(curve) for curve in each] for name, each in curves.items()}
    return Outcome(list(rows(curves)), targets, {"curves": results, "teacher": reached.evaluate(0, teacher)})
