"""`width: cost` against fixed crews in simulated runs of the 7B example, whose responses are long.

    python -m benchmarks.width_example [--json] [--counts N ...] [--iterations N] [--seeds N]

The settings of benchmarks.width_choice have short responses, so that what a member computes again of a response that it
takes over costs little there. Here it costs much. Compared is seconds^(1 - w) x dollars^w of the whole run, its first
iterations included, with the configuration's own w. All crews draw their machines from the same market, and what the
forecast does not know it estimates.
"""

import argparse
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from benchmarks.reporting import Target, finish
from benchmarks.width_choice import WITHIN, fixed_crew, weighed
from tasks.configuration.run_config import parse
from tasks.forecasting.inputs import gather
from tasks.forecasting.probe import NoProbe
from tasks.forecasting.scenario import Scenario
from tasks.forecasting.setups import configured
from tasks.forecasting.simulate import simulate

EXAMPLE = Path(__file__).parents[1] / "examples" / "qwen2_5_7b_math.yaml"
# Shares of the machines on offer that fixed crews have.
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A crew of the example: `fixed` members, or None, as `width: cost` chooses among `offered`."""

    offered: int
    fixed: int | None
    seed: int
    iterations: int


def scenario(arm: Arm) -> Scenario:
    """The forecast's own scenario of the example with this crew."""
    document = yaml.safe_load(EXAMPLE.read_text())
    document["pools"]["rollout"]["count"] = arm.offered
    document["planning"]["width"] = "cost"
    config = parse(document)
    given = configured(config, gather(config, NoProbe(reason="nothing has run"))).scenario
    given = replace(given, work=replace(given.work, iterations=arm.iterations))
    return given if arm.fixed is None else fixed_crew(given, arm.fixed, config.planning.seeding)


def weight_of(arm: Arm) -> float:
    """The seconds and dollars of the arm's run, weighed as the configuration says."""
    given = scenario(arm)
    return weighed(simulate(given, seed=arm.seed), given.policy.planning.cost_weight)


def arms(offered: int, *, seeds: int, iterations: int) -> list[Arm]:
    """The planner, and fixed crews of several sizes."""
    sizes = [None, *sorted({max(1, round(share * offered)) for share in SHARES})]
    return [Arm(offered=offered, fixed=size, seed=s, iterations=iterations) for size in sizes for s in range(seeds)]


def ratios(run: dict[Arm, float]) -> dict[int | None, float]:
    """By crew: its mean over that of the best fixed crew."""
    found: dict[int | None, float] = {}
    for crew in dict.fromkeys(arm.fixed for arm in run):
        found[crew] = statistics.mean(weight for arm, weight in run.items() if arm.fixed == crew)
    best = min(weight for crew, weight in found.items() if crew is not None)
    return {crew: weight / best for crew, weight in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 32, 64], help="spot machines on offer")
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    rows, targets = [], []
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for offered in options.counts:
            asked = arms(offered, seeds=options.seeds, iterations=options.iterations)
            found = ratios(dict(zip(asked, pool.map(weight_of, asked), strict=True)))
            for crew, ratio in found.items():
                rows.append({"on offer": offered, "crew": "width: cost" if crew is None else crew, "ratio": ratio})
            targets.append(Target(f"cost_over_best_fixed_of_{offered}", found[None], f"<= {WITHIN}"))
    notes = {"iterations": options.iterations, "seeds": options.seeds}
    finish("width_example", rows, targets, as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
