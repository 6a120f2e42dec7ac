"""The speed of the simulator: twelve hours of a run, and the growth of its time with members and responses.

Run: python -m benchmarks.forecasting [--json]. Losses are drawn from resources.spot_trace.AWS_P3; lengths are
log-normal. The growth is that of one iteration of 100 responses per member, from the second size on.
"""

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.reporting import Target, finish
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

STEP_S = ((1, 0.02), (64, 0.025), (256, 0.05))
RESPONSES_PER_MEMBER = 100
SIZES = (10, 32, 100, 316, 1000)
TWELVE_HOURS_S = 12 * 3600.0


def a_scenario(members: int, prompts: int, iterations: int) -> Scenario:
    """A scenario with members that come and go, groups of eight, and a trainer that needs 400 s for any step."""
    tokens = prompts * 8 * 3500
    return Scenario(
        name="speed",
        pools=(
            PoolScenario(
                count=members,
                usd_per_h=3.5,
                gpus=2,
                responses_max=256,
                step_s=STEP_S,
                prefill_tokens_per_s=20_000.0,
                start_s=100.0,
                link_gbps=50.0,
                availability=AvailabilityScenario(process="aws-p3"),
            ),
        ),
        trainer=TrainerScenario(
            engines=4,
            usd_per_h=55.0,
            gpus=8,
            responses_max=256,
            step_s=STEP_S,
            prefill_tokens_per_s=20_000.0,
            train_s_per_token=400.0 / tokens,
        ),
        work=WorkScenario(
            num_prompts_per_step=prompts,
            num_generations=8,
            prompt_tokens=200,
            lengths=LengthsScenario(median=2500.0, sigma=0.8, cap=14_336),
            iterations=iterations,
        ),
        policy=Policy(weights_bytes=29.5e9),
    )


def timed(scenario: Scenario, span_s: float | None = None) -> tuple[SimulatedRun, float]:
    """Simulate a run; returns it and the seconds that the simulation took."""
    began_s = time.perf_counter()
    run = simulate(scenario, seed=0, span_s=span_s)
    return run, time.perf_counter() - began_s


def row(name: str, scenario: Scenario, run: SimulatedRun, took_s: float) -> dict[str, Any]:
    """The table row of a simulation and its time."""
    return {
        "what": name,
        "members": scenario.pools[0].count,
        "responses": scenario.work.num_responses,
        "iterations": len(run.iterations),
        "virtual h": run.duration_s / 3600,
        "seconds": took_s,
        "us/response": took_s * 1e6 / (scenario.work.num_responses * len(run.iterations)),
        "losses": sum(sum(each.losses.values()) for each in run.iterations),
        "moved": sum(each.moved for each in run.iterations),
        "regenerated %": 100 * run.tokens_regenerated / run.tokens,
    }


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent of growth, by least squares in logarithms."""
    xs, ys = [math.log(size) for size in sizes], [math.log(duration_s) for duration_s in seconds]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    day = a_scenario(64, 128, 10_000)
    run, twelve_hours_s = timed(day, TWELVE_HOURS_S)
    rows = [row("12 h", day, run, twelve_hours_s)]
    seconds = []
    for members in SIZES:
        scenario = a_scenario(members, members * RESPONSES_PER_MEMBER // 8, 1)
        run, took_s = timed(scenario)
        rows.append(row("growth", scenario, run, took_s))
        seconds.append(took_s)
    targets = [
        Target("simulated_12h_s", twelve_hours_s, "<= 30"),
        Target("growth_exponent", slope(SIZES[1:], seconds[1:]), "<= 1.5"),
        Target("largest_size_s", seconds[-1], "<= 120"),
    ]
    finish("forecasting", rows, targets, as_json=options.json, notes={"span_h": 12})


if __name__ == "__main__":
    main()
