"""`width: cost` against the best static crew in hindsight, in simulated runs of settings that a seed draws.

    python -m benchmarks.width_choice [--json] [--settings N] [--first N] [--elsewhere N] [--processes N]
    python -m benchmarks.width_choice [--json] --merge FILE...

A setting draws the model, lengths, machines, prices, starts of machines and processes, losses, and how dollars are
weighed; every parameter and its values stand in `drawn`. Its run is simulated with `width: cost`, and again with each
fixed number of members, with and without seeding. The best of these static crews is known in hindsight only, and their
machines come and go by the same trace. All have the same lengths. Compared is seconds^(1 - w) x dollars^w of the whole
run, its first iterations included, in which nothing is known yet.

Hindsight is also lucky: the crew is chosen by the run in which it is judged. With --elsewhere the static crews run with
other seeds, too, and the one that is best there is judged beside the planner. The settings can be run in parts: each
part's output, with --json, is a file for --merge, which sums up all of them.
"""

import argparse
import json
import math
import multiprocessing
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.reporting import Target, finish
from resources.accelerators import accelerator
from resources.model_size import ModelSize
from tasks.configuration.planning import PlanningConfig
from tasks.crew_model.events import Stalled
from tasks.forecasting.engine_estimate import Device, prefill_tokens_per_s, step_points
from tasks.forecasting.results import SimulatedRun
from tasks.forecasting.scenario import (
    AvailabilityScenario,
    LengthsScenario,
    Policy,
    PoolScenario,
    Scenario,
    TrainerScenario,
    WorkScenario,
)
from tasks.forecasting.simulate import simulate

ITERATIONS = 16
# The distance between two seeds of a setting, more than the number of settings that anyone runs.
SEEDS_APART = 10_000
WITHIN, SHARE = 1.03, 0.9
# Parameters, and bytes of cache per token: Qwen3-1.7B, Qwen2.5-7B, Qwen3-14B.
MODELS = ((1.72e9, 114_688.0), (7.62e9, 57_344.0), (14.77e9, 163_840.0))
GPU = accelerator("H100-80GB")
RESERVED_USD_PER_H = 6.88
# Operations per parameter and trained token, with gradient checkpointing.
TRAIN_OPERATIONS = 8.0
BANDWIDTH_EFFICIENCY, MFU = 0.6, 0.35


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A setting's run. ratio: its seconds^(1 - w) x dollars^w over that of the best static crew.

    best: that crew, as (members, seeding). widths: the members that each iteration asked for. lucky: what the static
    crew that is best with other seeds has over the best one here, at least 1; None: not run.
    """

    setting: int
    ratio: float
    best: tuple[int, str]
    widths: tuple[int, ...]
    lucky: float | None = None


def drawn(setting: int) -> Scenario:
    """The setting of this number; the same for the same number."""
    rng = random.Random(setting)
    parameters, cache = rng.choice(MODELS)
    # Without layers a step has no fixed cost.
    size = ModelSize(parameters=parameters, weight_bytes=2, kv_bytes_per_token=cache, layers=0)
    device = Device(accelerator=GPU, gpus=1, bandwidth_efficiency=BANDWIDTH_EFFICIENCY, mfu=MFU)
    median = rng.choice((500.0, 1500.0, 4000.0))
    limit = rng.choice((32, 64, 128, 256))
    engine: dict[str, Any] = {
        "responses_max": limit,
        "step_s": step_points(size, device, limit, 1.3 * median),
        "prefill_tokens_per_s": prefill_tokens_per_s(size, device),
    }
    groups, generations, engines = rng.choice((8, 16, 32)), rng.choice((8, 16)), rng.choice((1, 2, 4, 8))
    loses = AvailabilityScenario(process="aws-p3", rate_factor=rng.choice((0.3, 1.0, 3.0)))
    pool = PoolScenario(
        count=rng.choice((2, 4, 6)),
        usd_per_h=rng.choice((0.5, 1.82, 4.0, 10.0)),
        start_s=rng.choice((0.0, 60.0, 180.0, 600.0, 1800.0)),
        process_s=rng.choice((10.0, 60.0, 120.0)),
        link_gbps=rng.choice((10.0, 25.0)),
        availability=rng.choice((loses, None)),
        **engine,
    )
    trained_per_s = engines * GPU.flops * MFU / (TRAIN_OPERATIONS * parameters)
    trainer = TrainerScenario(
        engines=engines,
        usd_per_h=RESERVED_USD_PER_H * engines,
        gpus=engines,
        process_s=rng.choice((10.0, 60.0, 120.0)),
        # Longer than the estimate by this factor.
        train_s_per_token=rng.choice((0.5, 1.0, 3.0)) / trained_per_s,
        train_fixed_s=rng.choice((2.0, 15.0)),
        control_s=rng.choice((5.0, 30.0)),
        micro_batch_responses=generations,
        **engine,
    )
    policy = Policy(
        planning=PlanningConfig(width="cost", seeding="auto", cost_weight=rng.choice((0.0, 0.3, 0.5, 0.7))),
        in_order=rng.random() < 0.3,
        max_staleness=int(rng.random() < 0.2),
        predictor=rng.choice(("none", "none", "history")),
        weights_bytes=size.bytes,
        weights_delta_bytes=0.02 * size.bytes,
    )
    work = WorkScenario(
        num_prompts_per_step=groups,
        num_generations=generations,
        prompt_tokens=200,
        prompts_in_dataset=3 * groups,
        lengths=LengthsScenario(
            median=median,
            sigma=rng.choice((0.5, 0.8, 1.1)),
            cap=round(median * rng.choice((4, 12))),
            rho=rng.choice((0.2, 0.5, 0.8)),
        ),
        iterations=ITERATIONS,
    )
    return Scenario(name=f"setting {setting}", pools=(pool,), trainer=trainer, work=work, policy=policy)


def static_crews(given: Scenario) -> dict[tuple[int, str], Scenario]:
    """The scenario with each fixed number of members, by (members, seeding)."""
    return {
        (count, seeding): fixed_crew(given, count, seeding)
        for count in range(given.pools[0].count + 1)
        for seeding in (("auto", "off") if count else ("auto",))
    }


def fixed_crew(given: Scenario, count: int, seeding: Literal["auto", "off"]) -> Scenario:
    """The scenario of one pool with this number of members, which take their machines from the same market."""
    pool = given.pools[0]
    planning = replace(given.policy.planning, width="fixed", seeding=seeding)
    pools = (replace(pool, count=count, places=pool.count),) if count else ()
    return replace(given, pools=pools, policy=replace(given.policy, planning=planning))


def weighed(run: SimulatedRun, cost_weight: float) -> float:
    """What is minimised, of the whole run."""
    return float(run.duration_s ** (1 - cost_weight) * run.usd**cost_weight)


def static_scores(given: Scenario, seed: int) -> dict[tuple[int, str], float]:
    """What each static crew takes, weighed; infinite if it never ends."""
    static = {}
    for crew, scenario in static_crews(given).items():
        try:
            static[crew] = weighed(simulate(scenario, seed=seed), given.policy.planning.cost_weight)
        except Stalled:
            static[crew] = math.inf
    return static


def outcome(setting: int, elsewhere: int = 0) -> Outcome:
    """The setting's run with `width: cost` beside all static crews. elsewhere: other seeds for these."""
    given = drawn(setting)
    chosen = simulate(given, seed=setting)
    static = static_scores(given, setting)
    best = min(static, key=lambda crew: static[crew])
    others = [static_scores(given, setting + SEEDS_APART * (number + 1)) for number in range(elsewhere)]
    known = min(static, key=lambda crew: math.prod(other[crew] for other in others))
    return Outcome(
        setting=setting,
        ratio=weighed(chosen, given.policy.planning.cost_weight) / static[best],
        best=best,
        widths=tuple(each.planned.get("rollout", 0) for each in chosen.iterations),
        lucky=static[known] / static[best] if others else None,
    )


def targets(outcomes: list[Outcome]) -> list[Target]:
    """The property is that SHARE of the settings stay within WITHIN; the worst settings are printed."""
    ratios = sorted(found.ratio for found in outcomes)
    within = sum(ratio <= WITHIN for ratio in ratios) / len(ratios)
    return [
        Target("ratio_median", statistics.median(ratios), f"<= {WITHIN}"),
        Target("ratio_mean", statistics.mean(ratios), f"<= {WITHIN}"),
        Target("share_within_3_percent", within, f">= {SHARE}"),
    ]


def luck(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """How much of the gap is the luck of hindsight; empty if no other seeds were run."""
    lucky = [found.lucky for found in outcomes if found.lucky is not None]
    if not lucky:
        return {}
    honest = [found.ratio / found.lucky for found in outcomes if found.lucky is not None]
    return {
        "best_elsewhere_over_best_mean": statistics.mean(lucky),
        "best_elsewhere_within_3_percent": sum(each <= WITHIN for each in lucky) / len(lucky),
        "planner_over_best_elsewhere_mean": statistics.mean(honest),
        "planner_over_best_elsewhere_within_3_percent": sum(each <= WITHIN for each in honest) / len(honest),
    }


def merged(files: Sequence[Path]) -> list[Outcome]:
    """The outcomes of several parts; raises ValueError if a setting is in two of them."""
    found: dict[int, Outcome] = {}
    for file in files:
        for one in json.loads(file.read_text().splitlines()[-1])["outcomes"]:
            if one["setting"] in found:
                raise ValueError(f"--merge: setting {one['setting']} in {file} and before; allowed: each once")
            members, seeding = one["best"]
            lists = {"best": (members, seeding), "widths": tuple(one["widths"])}
            found[one["setting"]] = Outcome(**one | lists)
    return [found[setting] for setting in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--settings", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first setting")
    parser.add_argument("--elsewhere", type=int, default=0, help="other seeds with which static crews run, too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="sum up parts that ended with --json")
    options = parser.parse_args()
    if options.merge:
        outcomes = merged(options.merge)
    else:
        numbers = range(options.first, options.first + options.settings)
        with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            outcomes = list(pool.map(outcome, numbers, [options.elsewhere] * len(numbers)))
    worst = sorted(outcomes, key=lambda found: -found.ratio)[:20]
    rows = [
        {
            "setting": found.setting,
            "ratio": found.ratio,
            "best static crew": f"{found.best[0]}, seeding {found.best[1]}",
            "members asked for": " ".join(map(str, found.widths)),
        }
        for found in worst
    ]
    notes = {"settings": len(outcomes), "iterations": ITERATIONS, "shown": "the 20 worst settings"}
    lucky = luck(outcomes)
    for name, value in lucky.items():
        print(f"{name}: {value:.4f}")
    results = {"outcomes": [asdict(found) for found in outcomes], "luck": lucky}
    finish("width_choice", rows, targets(outcomes), as_json=options.json, notes=notes, results=results)


if __name__ == "__main__":
    main()
