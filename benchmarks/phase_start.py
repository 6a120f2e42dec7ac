"""Claim: a train phase that begins when 90 % of the groups are recorded ends in time, and holds machines for little.

A simulation of one iteration after another: 128 groups of 8 responses with log-normal lengths, all decoded side by
side, so that a group ends with its longest response; and a trainer that needs the same time for every group. A share of
0 is a trainer that follows the rollout from its beginning. `start` is what a pod needs until it trains. Nothing here
reads storage or asks Flyte.
"""

import argparse
import math
import statistics
from dataclasses import dataclass

import numpy as np

from benchmarks.reporting import Target, finish

GROUPS, GENERATIONS = 128, 8
SHARES = (0.0, 0.5, 0.75, 0.9, 1.0)
CHOSEN = 0.9
# The longest response, in medians: a limit on the completion's length.
LENGTH_MAX = 8.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One workload.

    sigma: of the logarithm of lengths. busy: the share of a synchronous cycle in which the trainer computes. start: the
    time from asking for the machines to training, as a share of the rollout.
    """

    sigma: float
    busy: float
    start: float


SETTINGS = tuple(
    Setting(sigma=sigma, busy=busy, start=start)
    for sigma in (0.5, 0.8, 1.1)
    for busy in (0.1, 0.2, 0.3)
    for start in (0.0, 0.02)
)
MAIN = Setting(sigma=0.8, busy=0.2, start=0.0)


def iteration(ends: np.ndarray, setting: Setting, share: float) -> tuple[float, float]:
    """(length of the iteration, how long the trainer's machines are held), in rollouts.

    ends: [groups] float64, when each group ends, ascending; the last one at 1. share: of the groups, at which the phase
    begins.
    """
    per_group = setting.busy / (1 - setting.busy) / len(ends)
    begun = 0.0 if share == 0 else ends[math.ceil(share * len(ends)) - 1]
    at = begun + (0.0 if share == 0 else setting.start)
    for end in ends:
        at = max(at, end) + per_group
    return at, at - begun


def measure(setting: Setting, draws: int, rng: np.random.Generator) -> dict[float, tuple[float, float]]:
    """By share: the mean iteration over that of share 0, and the mean share of the iteration that machines are held."""
    found: dict[float, list[tuple[float, float]]] = {share: [] for share in SHARES}
    for _ in range(draws):
        lengths = np.minimum(rng.lognormal(0.0, setting.sigma, (GROUPS, GENERATIONS)), LENGTH_MAX)
        ends = np.sort(lengths.max(axis=1))
        for share in SHARES:
            found[share].append(iteration(ends / ends[-1], setting, share))
    beside = statistics.fmean(length for length, _ in found[0.0])
    means = {share: np.mean(each, axis=0) for share, each in found.items()}
    return {share: (float(length / beside), float(held / length)) for share, (length, held) in means.items()}


def main() -> None:
    """Parse, simulate, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, main_row = [], {}
    for setting in SETTINGS:
        measured = measure(setting, options.draws, np.random.default_rng(0))
        if setting == MAIN:
            main_row = measured
        for share, (length, held) in measured.items():
            rows.append(
                {
                    "sigma": setting.sigma,
                    "busy": setting.busy,
                    "start": setting.start,
                    "share": share,
                    "iteration": length,
                    "held": held,
                    "runs at most": 1 / held,
                }
            )
    length, held = main_row[CHOSEN]
    targets = [
        Target("iteration_over_training_beside_the_rollout", length, "<= 1.05"),
        Target("share_of_the_iteration_that_machines_are_held", held, "<= 0.3"),
    ]
    finish("phase_start", rows, targets, as_json=options.json, notes={"draws": options.draws})


if __name__ == "__main__":
    main()
