"""Dispatch against the exact optimum of small instances, which is found by trying every dealing.

    python -m benchmarks.dispatch_optimum [--json] [--instances N] [--first-seed N]

An instance has 3 to 7 groups of known lengths and 2 or 3 members, which may differ in speed, start and in how many
responses they decode together. A dealing's makespan is the exact time of its last response; no work moves between
members, and each begins its longest groups first.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from benchmarks.reporting import Target, finish
from tasks.crew_model.step_time import StepTime
from tasks.planning.capacity import GroupLengths
from tasks.planning.dispatch import GroupWork, TimedAssignment, dispatch, exactly_longest_first, in_turn, longest_first
from tasks.planning.makespan import DispatchMember, ends_s, response_lengths

CURVES = (
    StepTime(((1, 0.020), (8, 0.021), (16, 0.030))),
    StepTime(((1, 0.020), (16, 0.080))),
    StepTime(((1, 0.020),)),
)
GENERATIONS = (1, 4)


@dataclass(frozen=True)
class Instance:
    lengths: GroupLengths
    generations: int
    members: tuple[DispatchMember, ...]

    @property
    def work(self) -> GroupWork:
        lengths = response_lengths(self.lengths, self.generations)
        return GroupWork(lengths, tuple(np.argsort(-self.lengths.expected, kind="stable").tolist()), keep_order=False)


def drawn(seed: int) -> Instance:
    """The instance of this seed: lengths are known exactly, so that the optimum of what is expected is the optimum."""
    rng = np.random.default_rng(seed)
    expected = np.ceil(rng.lognormal(6.0, rng.choice([0.3, 0.8, 1.2]), rng.integers(3, 8)))
    alike = bool(rng.integers(2))
    kinds = [rng.integers(len(CURVES)), rng.choice([2, 4, 16]), 0.0]
    members = []
    for place in range(int(rng.integers(2, 4))):
        curve, responses_max, start_s = kinds
        if not alike and place:
            curve, responses_max, start_s = (
                rng.integers(len(CURVES)),
                rng.choice([2, 4, 16]),
                float(rng.choice([0, 5.0])),
            )
        members.append(
            DispatchMember(
                pool="crew", step_time=CURVES[int(curve)], responses_max=int(responses_max), start_s=float(start_s)
            )
        )
    return Instance(GroupLengths("known", expected, expected), int(rng.choice(GENERATIONS)), tuple(members))


def optimum_s(instance: Instance) -> float:
    """The least makespan of all dealings. Each member's time of every set of groups is computed once."""
    work, groups = instance.work, len(instance.lengths)
    times = [
        [
            ends_s(work.lengths, [work.begun([g for g in range(groups) if chosen >> g & 1])], [member])[0]
            for chosen in range(1 << groups)
        ]
        for member in instance.members
    ]
    best = float("inf")
    for places in product(range(len(times)), repeat=groups):
        sets = [0] * len(times)
        for group, place in enumerate(places):
            sets[place] |= 1 << group
        best = min(best, max(of_member[chosen] for of_member, chosen in zip(times, sets, strict=True)))
    return best


def dispatched_s(instance: Instance) -> float:
    return dispatch(instance.lengths, instance.generations, instance.members, "makespan").makespan_s


def dealt_s(way: Callable[[GroupWork, tuple[DispatchMember, ...]], TimedAssignment]) -> Callable[[Instance], float]:
    return lambda instance: way(instance.work, instance.members).makespan_s


WAYS: dict[str, Callable[[Instance], float]] = {
    "dispatch": dispatched_s,
    "longest first, by exact times": dealt_s(exactly_longest_first),
    "longest first, by rates": dealt_s(longest_first),
    "in turn": dealt_s(in_turn),
}


def ratios(way: Callable[[Instance], float], seeds: range) -> list[float]:
    """The makespan of this way over the optimum, by instance. A bounded batch may end sooner than any dealing."""
    return [way(instance) / optimum_s(instance) for instance in map(drawn, seeds)]


def targets(found: dict[str, list[float]]) -> list[Target]:
    better = [exact < ours * (1 - 1e-9) for ours, exact in zip(*list(found.values())[:2], strict=True)]
    return [
        Target("mean_ratio_to_optimum", statistics.mean(found["dispatch"]), "<= 1.008"),
        Target("share_where_exact_times_are_better", sum(better) / len(better), "<= 0"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.instances)
    found = {name: ratios(way, seeds) for name, way in WAYS.items()}
    rows: list[dict[str, Any]] = [
        {
            "way": name,
            "mean ratio": statistics.mean(values),
            "95th percentile": sorted(values)[int(0.95 * len(values))],
            "worst": max(values),
            "optimal in": f"{sum(value <= 1 + 1e-9 for value in values)} of {len(values)}",
        }
        for name, values in found.items()
    ]
    finish("dispatch_optimum", rows, targets(found), as_json=options.json, notes={"seeds": str(seeds)})


if __name__ == "__main__":
    main()
