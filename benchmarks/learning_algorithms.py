"""The part of `benchmarks.learning` that trains with the preset of every algorithm: undisturbed runs with some seeds.

Runs take turns, one iteration of each algorithm at a time, in this process. The benchmark compares the reward on
held-out problems before and after, sampled with the same noise.
"""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.learning_run import EXECUTION, Run, make_run
from benchmarks.reporting import Target, finish
from storage.clock import SystemClock
from storage.records.records import ReportRecord
from storage.records.run import release_lease
from storage.stores.connect import connect
from tasks.configuration.presets import PRESETS
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.session.member import generate_slot

# Two optimizer steps, so that the second one has a ratio to clip. CHANGES replaces preset values for larger models.
STEPS = {"num_mini_batches": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {"overlong_buffer_length": 16, "filter_groups_budget": 1.5},
    "rloo": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "clip_ratio_high": 0.2,
    },
    "gspo": {},
    "cispo": {},
    "ppo": {},
}
SECTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"critic": {"optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.99]}, "warmup_iterations": 1}},
}


def algorithm(name: str) -> dict[str, Any]:
    """The section `algorithm` of a configuration."""
    preset = {"preset": name} if name in PRESETS else {}
    return {**preset, **STEPS, **CHANGES[name]}


def chosen(names: str) -> list[str]:
    """The algorithms of "all", or of a list with commas; raises ValueError for an unknown one."""
    found = list(CHANGES) if names == "all" else names.split(",")
    for name in found:
        if name not in CHANGES:
            raise ValueError(f"--algorithms: value {name!r}; allowed: all, {', '.join(CHANGES)}")
    return found


def iterate(run: Run) -> ReportRecord:
    """One iteration in this process."""
    clock = SystemClock()
    reference, [slots] = prepare(run.config, EXECUTION, clock)
    for slot in slots:
        generate_slot(reference.run_url, reference.iteration, slot, lambda: False, clock)
    train_iteration(reference.run_url, reference.iteration, EXECUTION, clock)
    return conclude_iteration(connect(reference.run_url), reference.iteration, {"rollout": 0.0, "train": 0.0}, clock)


def learn(folder: Path, model: Path, names: list[str], seeds: int, iterations: int) -> list[dict[str, Any]]:
    """The result of every algorithm with every seed."""
    found = []
    for seed in range(seeds):
        runs = {
            name: make_run(
                folder / name, model, seed, killed=False, algorithm=algorithm(name), **SECTIONS.get(name, {})
            )
            for name in names
        }
        before = next(iter(runs.values()))
        first: float | None = None
        curves: dict[str, list[ReportRecord]] = {name: [] for name in names}
        for _ in range(iterations):
            for name, run in runs.items():
                curves[name].append(iterate(run))
        for name, run in runs.items():
            release_lease(connect(run.config.run.url), EXECUTION)
            first = before.evaluate(0, model) if first is None else first
            found.append(
                {
                    "algorithm": name,
                    "seed": seed,
                    "before": first,
                    "after": run.evaluate(iterations, model),
                    "curve": [report.metrics["reward"] for report in curves[name]],
                    "grad_norms": [report.metrics.get("actor/grad_norm") for report in curves[name]],
                }
            )
    return found


def report(found: list[dict[str, Any]], iterations: int, *, as_json: bool) -> None:
    """Print table, targets and JSON."""
    names = list(dict.fromkeys(one["algorithm"] for one in found))
    rows, targets = [], []
    for name in names:
        own = [one for one in found if one["algorithm"] == name]
        gains = [one["after"] - one["before"] for one in own]
        rows.append(
            {
                "algorithm": name,
                "reward before": statistics.fmean(one["before"] for one in own),
                "reward after": statistics.fmean(one["after"] for one in own),
                "gain, worst seed": min(gains),
                "gain, mean": statistics.fmean(gains),
            }
        )
        targets.append(
            Target(f"seeds_whose_reward_rises_with_{name}", sum(gain > 0 for gain in gains), f">= {len(own)}")
        )
    notes = {"iterations": iterations, "seeds": len(found) // len(names)}
    finish("learning", rows, targets, as_json=as_json, notes=notes, results={"runs": found})
