"""Claim: kills do not change what is learned. Reward curves with and without SIGKILLs are equal to the last digit.

For each seed, two runs of the demo's task take turns, iteration by iteration: one is undisturbed, and the members of
the other are killed in every iteration. The policy is first warm-started on short problems, so that the benchmark takes
about a minute on a laptop.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import learning_algorithms
from benchmarks.crew_processes import Crew
from benchmarks.learning_run import EXECUTION, WARM_START, make_run
from benchmarks.reporting import Target, finish
from examples.warm_start import warm_start
from storage.records.records import ReportRecord
from storage.records.run import release_lease
from storage.stores.connect import connect


def run_seed(folder: Path, model: Path, seed: int, iterations: int) -> dict[str, Any]:
    """Run both runs of a seed, one iteration of each in turn."""
    runs = [make_run(folder, model, seed, killed=killed) for killed in (False, True)]
    curves: list[list[ReportRecord]] = [[], []]
    for iteration in range(iterations):
        for run, curve in zip(runs, curves, strict=True):
            curve.append(run.iterate(seed, iteration))
    for run in runs:
        release_lease(connect(run.config.run.url), EXECUTION)
    calm, killed = curves
    return {
        "seed": seed,
        "before": runs[0].evaluate(0, model),
        "after": runs[0].evaluate(iterations, model),
        "after_killed": runs[1].evaluate(iterations, model),
        "curve": [report.metrics["reward"] for report in calm],
        "curve_killed": [report.metrics["reward"] for report in killed],
        "rewards_equal": [a.rewards for a in calm] == [b.rewards for b in killed],
        "lengths_equal": [a.lengths for a in calm] == [b.lengths for b in killed],
        "weights_equal": runs[0].final_weights(iterations) == runs[1].final_weights(iterations),
        "kills": sum(len(run.crew.kills) for run in runs),
        "recovered": sum(int(report.metrics["resume/tokens_recovered"]) for report in killed),
    }


def report(seeds: list[dict[str, Any]], iterations: int, *, as_json: bool) -> None:
    """Print table, targets and JSON."""
    rows = [
        {
            "seed": one["seed"],
            "reward before": one["before"],
            "reward after": one["after"],
            "reward after, killed": one["after_killed"],
            "kills": one["kills"],
            "tokens recovered": one["recovered"],
            "rewards equal": one["rewards_equal"],
            "lengths equal": one["lengths_equal"],
            "final weights bit-equal": one["weights_equal"],
        }
        for one in seeds
    ]
    targets = [
        Target("seeds_with_equal_reward_curves", sum(one["rewards_equal"] for one in seeds), f">= {len(seeds)}"),
        Target("seeds_with_bit_equal_weights", sum(one["weights_equal"] for one in seeds), f">= {len(seeds)}"),
        Target("seeds_whose_reward_rises", sum(one["after"] > one["before"] for one in seeds), f">= {len(seeds)}"),
        Target("reward_gain_mean", statistics.fmean(one["after"] - one["before"] for one in seeds), "> 0.05"),
    ]
    results = {"curves": {str(one["seed"]): [one["curve"], one["curve_killed"]] for one in seeds}}
    finish("learning", rows, targets, as_json=as_json, notes={"iterations": iterations}, results=results)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, help="default: 4, with --algorithms 6")
    parser.add_argument("--algorithms", help="train with all, or with these, instead: every one must lift the reward")
    given = parser.parse_args()
    iterations = given.iterations or (6 if given.algorithms else 4)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        warm_start(folder / "model", WARM_START, lambda _step, _loss: None)
        if given.algorithms:
            found = learning_algorithms.learn(
                folder, folder / "model", learning_algorithms.chosen(given.algorithms), given.seeds, iterations
            )
            learning_algorithms.report(found, iterations, as_json=given.json)
            return
        Crew(folder / "none").warm_up()
        seeds = [run_seed(folder, folder / "model", seed, iterations) for seed in range(given.seeds)]
    report(seeds, iterations, as_json=given.json)


if __name__ == "__main__":
    main()
