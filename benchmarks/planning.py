"""The gain of dispatch over dealing in turn, at random and longest first, on actual lengths; and the planner's speed.

Lengths are drawn from a long-tailed distribution in which `intra_group` sets how much a group's responses have in
common. Dispatch sees a predictor's expectations, and is timed exactly on the actual lengths
(tasks/planning/makespan.py):

- oracle: mean and 90 % quantile of each group's own responses.
- noisy: the group's level with an error. Of the longest fifth of the groups it finds about 87 %, as StreamRL's ranker
  does (arXiv 2504.15930), if groups have most in common, and fewer otherwise.
- none: the same expectation for all groups.

No response is moved after it was dealt. Seer found that even the true lengths can lose to balancing during decoding if
groups stay whole (its section 4.2.1, on StreamRL's oracle). The effect of members that claim work from each other is
measured in benchmarks.histories and benchmarks.storm.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reporting import Target, finish, interleave, medians
from tasks.configuration.planning import PlanningConfig
from tasks.crew_model.ownership import CrewRules
from tasks.crew_model.step_time import StepTime
from tasks.history.planning_inputs import REPORTS_READ
from tasks.planning.capacity import GroupLengths, PoolCapacity, StepWaits, TrainerCapacity
from tasks.planning.dispatch import Dispatch, GroupWork, dispatch, even_ranges, longest_first
from tasks.planning.division import assign_groups
from tasks.planning.iteration_plan import plan_iteration
from tasks.planning.makespan import DispatchMember, Lengths, ends_s, lower_bound_s, member_time_s
from tasks.planning.request import PlanningRequest

Quantile = Callable[[Lengths], Lengths]

NUM_GENERATIONS = 8
GROUPS = 128
LENGTH_MAX = 32_768.0
INTRA_GROUP = (0.0, 0.5, 0.8)
LONGEST_SHARE = 0.2
LEVEL_ERROR = 0.1
# This curve is memory-bound up to a batch of 32, and compute-bound beyond 128.
CURVE = StepTime(((1, 0.020), (32, 0.021), (64, 0.024), (128, 0.032), (256, 0.052)))
# With this curve the decode rate grows with every larger batch, while that of each response falls.
RISING = StepTime(((1, 0.020), (64, 0.040)))
SETTINGS = {
    "fixed width": PlanningConfig(),
    "least machine time": PlanningConfig(objective="gpu_seconds"),
    "cost": PlanningConfig(width="cost"),
    "balance": PlanningConfig(width="balance"),
    "seeding": PlanningConfig(seeding="auto"),
    "cost and seeding": PlanningConfig(width="cost", seeding="auto"),
}
# Groups, and the members on offer: in the first one as many as widths are estimated.
SIZES = ((128, 16), (512, 32), (2048, 128), (12_500, 1000))


@dataclass(frozen=True)
class Iteration:
    """The groups' actual lengths, [groups, NUM_GENERATIONS], and levels: what a group's responses have in common."""

    lengths: Lengths
    level: Lengths


def log_normal(normal: Lengths) -> Lengths:
    """Lengths for standard normal values: median 2,000 tokens, one in ten above 7,200."""
    return np.asarray(np.clip(np.exp(np.log(2000.0) + normal), 1, LENGTH_MAX))


def quantile_table(path: Path) -> Quantile:
    """The same function from a table whose columns are quantile and tokens."""
    table = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 1), ndmin=2)
    if len(table) < 2 or (np.diff(table, axis=0) < 0).any() or table[0, 1] < 1:
        raise ValueError(f"lengths: {path}; allowed: two rows or more, quantile and tokens ascending, tokens above 0")

    def of(normal: Lengths) -> Lengths:
        return np.interp(_normal_share(normal), table[:, 0], table[:, 1])

    return of


def _normal_share(normal: Lengths) -> Lengths:
    normal_distribution = statistics.NormalDist()
    grid = np.linspace(-5, 5, 2001)
    return np.interp(normal, grid, [normal_distribution.cdf(value) for value in grid.tolist()])


def draw(quantile: Quantile, groups: int, intra_group: float, rng: np.random.Generator) -> Iteration:
    level = np.sqrt(intra_group) * rng.standard_normal(groups)
    own = np.sqrt(1 - intra_group) * rng.standard_normal((groups, NUM_GENERATIONS))
    return Iteration(np.ceil(quantile(level[:, None] + own)), level)


def oracle(iteration: Iteration) -> GroupLengths:
    means = iteration.lengths.mean(axis=1)
    return GroupLengths("oracle", means, np.maximum(means, np.quantile(iteration.lengths, 0.9, axis=1)))


def noisy(quantile: Quantile, iteration: Iteration, intra_group: float, rng: np.random.Generator) -> GroupLengths:
    """The expected lengths of a predictor that sees each group's level with an error of known size."""
    error = LEVEL_ERROR * np.sqrt(intra_group)
    seen = iteration.level + error * rng.standard_normal(len(iteration.level))
    trust = intra_group / (intra_group + error**2) if intra_group else 0.0
    left = np.sqrt(1 - intra_group * trust)
    grid = np.array([statistics.NormalDist().inv_cdf((k + 0.5) / 64) for k in range(64)])
    lengths = quantile(trust * seen[:, None] + left * grid)
    means = lengths.mean(axis=1)
    high = quantile(trust * seen + left * statistics.NormalDist().inv_cdf(0.9))
    return GroupLengths("noisy", means, np.maximum(means, high))


def recall(told: GroupLengths, iteration: Iteration) -> float:
    """The share of the groups with the longest means that are expected among the longest."""
    count = round(LONGEST_SHARE * len(told))
    longest = set(np.argsort(-iteration.lengths.mean(axis=1))[:count].tolist())
    return len(longest & set(np.argsort(-told.expected)[:count].tolist())) / count


def times_s(lengths: Lengths, dispatched: Dispatch, members: Sequence[DispatchMember]) -> list[float]:
    """The time at which each member has decoded its groups, with its batch limit."""
    ends = []
    for assignment, member in zip(dispatched.assignments, members, strict=True):
        batch = min(member.responses_max, assignment.batch_max or member.responses_max)
        taken = lengths[list(assignment.groups)]
        ends.append(member.start_s + member_time_s(taken, member.step_time, batch) if taken.size else 0.0)
    return ends


def arms_s(
    quantile: Quantile, members: Sequence[DispatchMember], intra_group: float, seed: int
) -> dict[str, list[float]]:
    """For each way of dealing, the end of every member, on one draw."""
    rng = np.random.default_rng(seed)
    iteration = draw(quantile, GROUPS, intra_group, rng)
    lengths, told = iteration.lengths, noisy(quantile, iteration, intra_group, rng)
    known = oracle(iteration)
    alike = GroupLengths(
        "none", *(np.full(GROUPS, float(value)) for value in (lengths.mean(), np.quantile(lengths, 0.9)))
    )
    longest = float(quantile(np.array([5.0]))[0])
    work = GroupWork(lengths, tuple(np.argsort(-lengths.mean(axis=1), kind="stable").tolist()), keep_order=False)
    # Without a prediction, the longest groups cannot come first either.
    numbered = assign_groups(GROUPS, len(members))
    shuffled = rng.permutation(GROUPS).tolist()
    ends = {
        "in turn": ends_s(lengths, numbered, members),
        "random": ends_s(lengths, [[shuffled[k] for k in part] for part in numbered], members),
        "longest first, oracle": longest_first(work, members).ends_s,
        "even ranges, oracle": even_ranges(work, members).ends_s,
    }
    for name, lengths_told in (("oracle", known), ("noisy", told), ("none", alike)):
        for objective in ("makespan", "gpu_seconds"):
            found = dispatch(lengths_told, NUM_GENERATIONS, members, objective, length_max=longest)
            ends[f"{objective}, {name}"] = times_s(lengths, found, members)
    return ends | {"bound": [lower_bound_s(lengths, members)], "recall": [recall(told, iteration)]}


def gains(
    quantile: Quantile, members: Sequence[DispatchMember], intra_group: float, seeds: range
) -> list[dict[str, Any]]:
    """One row per way of dealing: medians of makespan over bound and over in turn, and of machine time over in turn."""
    draws = [arms_s(quantile, members, intra_group, seed) for seed in seeds]
    found_recall = statistics.mean(ends.pop("recall")[0] for ends in draws)
    bounds = [ends.pop("bound")[0] for ends in draws]
    rows = []
    for way in draws[0]:
        latest = [max(ends[way]) for ends in draws]
        plain = [ends["in turn"] for ends in draws]
        rows.append(
            {
                "intra-group": intra_group,
                "way": way,
                "recall": found_recall if "noisy" in way else "",
                "makespan / bound": statistics.median(np.divide(latest, bounds).tolist()),
                "makespan / in turn": statistics.median(t / max(p) for t, p in zip(latest, plain, strict=True)),
                "machine time / in turn": statistics.median(
                    sum(ends[way]) / sum(p) for ends, p in zip(draws, plain, strict=True)
                ),
                "least / bound": min(np.divide(latest, bounds).tolist()),
            }
        )
    return rows


def planning_s(rounds: int, clock: Callable[[], float]) -> dict[tuple[int, str], float]:
    """The seconds by `clock` for a whole plan, by number of responses and setting."""
    arms: dict[str, Callable[[], float]] = {}
    for groups, count in SIZES:
        rng = np.random.default_rng(groups)
        told = oracle(draw(log_normal, groups, 0.5, rng))
        past = tuple(draw(log_normal, groups, 0.5, rng).lengths for _ in range(REPORTS_READ))
        for setting, planning in SETTINGS.items():
            arms[f"{groups * NUM_GENERATIONS} {setting}"] = _timed(a_request(told, past, count, planning), clock)
    found = medians(interleave(arms, rounds))
    return {(int(name.split(" ", 1)[0]), name.split(" ", 1)[1]): seconds for name, seconds in found.items()}


def a_request(told: GroupLengths, past: tuple[Lengths, ...], members: int, planning: PlanningConfig) -> PlanningRequest:
    """A request of a run with all measurements: step times, losses, starts, training, and the last iterations."""
    pool = PoolCapacity(
        name="rollout",
        count_min=1,
        count_max=members,
        usd_per_h=1.82,
        responses_max=128,
        step_time=CURVE,
        start_s=60.0,
        losses_per_h=0.6,
    )
    waits = StepWaits(
        wait_train_s=20.0, wait_remote_s=5.0, train_s=120.0, rollout_s=150.0, members=members, members_at_end=members
    )
    return PlanningRequest(
        num_generations=NUM_GENERATIONS,
        lengths=told,
        pools=(pool,),
        settings=planning,
        rules=CrewRules(flush_interval_s=5.0, heartbeat_interval_s=5.0, claim_ttl_s=30.0),
        reserved=TrainerCapacity(engines=8, usd_per_h=55.04, responses_max=128, step_time=CURVE),
        waits=waits,
        width=(("rollout", members),),
        planned_width=(("rollout", members),),
        past_lengths=past,
        train_s=120.0,
        length_max=LENGTH_MAX,
    )


def _timed(request: PlanningRequest, clock: Callable[[], float]) -> Callable[[], float]:
    def run() -> float:
        # A request caches its results, so every plan begins with a new one.
        fresh, began = replace(request), clock()
        plan_iteration(fresh)
        return clock() - began

    return run


def growth_exponent(seconds: dict[int, float]) -> float:
    """The slope of log(time) over log(size)."""
    sizes, times = np.log(list(seconds)), np.log(list(seconds.values()))
    slope: float = statistics.linear_regression(sizes.tolist(), times.tolist()).slope
    return slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=15)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--responses-max", type=int, default=256, help="that a member decodes together")
    parser.add_argument("--lengths", type=Path, help="CSV with columns quantile, tokens; without: log-normal")
    options = parser.parse_args()
    quantile = log_normal if options.lengths is None else quantile_table(options.lengths)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows: list[dict[str, Any]] = []
    for name, curve in (("memory-bound to 32", CURVE), ("rising", RISING)):
        members = [DispatchMember(pool="crew", step_time=curve, responses_max=options.responses_max)] * options.members
        for intra_group in INTRA_GROUP:
            rows += [{"step time": name} | row for row in gains(quantile, members, intra_group, seeds)]
    seconds = planning_s(options.rounds, time.perf_counter)
    cpu = planning_s(options.rounds, time.process_time)
    rows += [
        {"way": f"plan {size} responses, {setting}", "seconds": taken, "of the processor": cpu[size, setting]}
        for (size, setting), taken in seconds.items()
    ]
    fixed = {size: taken for (size, setting), taken in seconds.items() if setting == "fixed width"}

    def worst(way: str, column: str) -> float:
        return max(float(row[column]) for row in rows if row["way"] == way)

    measured = [row for row in rows if "least / bound" in row]
    targets = [
        Target("plan_1024_s", fixed[1024], "<= 1"),
        Target("plan_1024_slowest_setting_s", max(seconds[1024, name] for name in SETTINGS), "<= 1"),
        Target("plan_100000_s", fixed[100_000], "<= 1"),
        Target("plan_100000_slowest_setting_s", max(seconds[100_000, name] for name in SETTINGS), "<= 2"),
        Target("growth_exponent", growth_exponent(fixed), "<= 1.2"),
        Target("least_makespan_over_bound", min(row["least / bound"] for row in measured), ">= 1"),
        Target("makespan_oracle_over_in_turn_worst", worst("makespan, oracle", "makespan / in turn"), "<= 1"),
        Target("makespan_noisy_over_in_turn_worst", worst("makespan, noisy", "makespan / in turn"), "<= 1"),
        Target("makespan_none_over_in_turn_worst", worst("makespan, none", "makespan / in turn"), "<= 1"),
        Target("gpu_seconds_noisy_over_in_turn_worst", worst("gpu_seconds, noisy", "machine time / in turn"), "<= 1"),
    ]
    notes = {
        "groups": GROUPS,
        "generations": NUM_GENERATIONS,
        "lengths": options.lengths or "log-normal",
        "seeds": seeds,
    }
    notes |= {"members": options.members, "responses_max": options.responses_max, "rounds": options.rounds}
    finish("planning", rows, targets, as_json=options.json, notes={k: str(v) for k, v in notes.items()})


if __name__ == "__main__":
    main()
