"""Claim: a member that generates on an idle shared trainer shortens cycles, and pays more than its engine's start.

Like runs of cycles of 600 s, a fifth of which is training, share one trainer in virtual time, with and without a member
in its idle time (tasks/sharing/shared_cycles.py: production's order, and production's rule of when a member begins and
for whom). A member begins if no phase is expected for twice its engine's start. Only a part of each rollout can be
shortened by more machines; the rest is its longest responses. All figures are simulated: no trainer was measured.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from benchmarks.reporting import Target, finish
from storage.fleet.fleet_records import AdmittedRun
from tasks.sharing.shared_cycles import Conditions, Helping, share_trainer

CYCLE_S, PHASE_S, SWITCH_S = 600.0, 120.0, 2.0
RUNS, GPUS = (1, 2, 3), ((1, 1), (1, 2))
STARTS_S, DIVISIBLE = (5.0, 30.0, 60.0, 120.0, 240.0), (0.7, 0.3)
# A run that comes a little later than without a member is within what the simulation's draws differ by.
LONGER_MAX = 1.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Helped:
    """Runs on one trainer. ratio: of their mean cycle with a member to that without."""

    runs: int
    trainer_gpus: int
    rollout_gpus: int
    start_s: float
    divisible: float
    ratio: float
    helping: float


def like_runs(count: int, trainer_gpus: int, rollout_gpus: int) -> list[AdmittedRun]:
    """So many synchronous runs that differ by their draws alone."""
    return [
        AdmittedRun(
            id=str(number),
            run_url=f"memory://runs/{number}",
            phase_s=PHASE_S,
            cycle_s=CYCLE_S,
            state_bytes=0,
            admitted_at_s=0.0,
            rollout_gpus=rollout_gpus,
            trainer_gpus=trainer_gpus,
        )
        for number in range(count)
    ]


def compare(count: int, gpus: tuple[int, int], start_s: float, divisible: float, seeds: range, cycles: int) -> Helped:
    """Simulate the same draws with and without a member."""
    runs = like_runs(count, *gpus)
    helping = Helping(quiet_s=2 * start_s, start_s=start_s, divisible=divisible)
    ratios, parts = [], []
    for seed in seeds:
        plain = share_trainer(runs, Conditions(switch_s=SWITCH_S), iterations=cycles, seed=seed)
        helped = share_trainer(runs, Conditions(switch_s=SWITCH_S, helping=helping), iterations=cycles, seed=seed)
        ratios.append(helped.slowdown_mean / plain.slowdown_mean)
        parts.append(helped.part("backfill"))
    return Helped(
        runs=count,
        trainer_gpus=gpus[0],
        rollout_gpus=gpus[1],
        start_s=start_s,
        divisible=divisible,
        ratio=statistics.fmean(ratios),
        helping=statistics.fmean(parts),
    )


def sweep(seeds: range, cycles: int) -> Iterator[Helped]:
    """All numbers of runs, kinds of machines, starts, and divisible parts."""
    for count, gpus, divisible, start_s in product(RUNS, GPUS, DIVISIBLE, STARTS_S):
        yield compare(count, gpus, start_s, divisible, seeds, cycles)


def report(found: list[Helped], *, as_json: bool) -> None:
    """Print the ratio of cycles for each sweep; a row has all starts."""
    rows = []
    for count, gpus, divisible in product(RUNS, GPUS, DIVISIBLE):
        key = (count, *gpus, divisible)
        these = [each for each in found if (each.runs, each.trainer_gpus, each.rollout_gpus, each.divisible) == key]
        row: dict[str, object] = {"runs": count, "T:R": f"{gpus[0]}:{gpus[1]}", "divisible": divisible}
        rows.append(row | {f"start {each.start_s:g} s": round(each.ratio, 3) for each in these})
    longest = max(each.ratio for each in found)
    targets = [Target("longest_cycle_with_a_member_to_without", longest, f"<= {LONGER_MAX}")]
    finish("sharing_backfill", rows, targets, as_json=as_json, notes={"cycle_s": CYCLE_S, "phase_s": PHASE_S})


def main() -> None:
    """Parse, simulate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seeds < 1 or options.cycles < 1:
        parser.error(f"--seeds, --cycles: values {options.seeds}, {options.cycles}; allowed: at least 1 each")
    report(list(sweep(range(options.seeds), options.cycles)), as_json=options.json)


if __name__ == "__main__":
    main()
