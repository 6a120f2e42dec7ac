"""Claim: the slowdown that admission predicts is that of a much longer simulation, and it refuses no run that fits.

Each draw is one host with runs that are there and a newcomer. What `gleaner fleet admit` predicts is compared with
simulations that are many times as long and have other seeds. A run that was refused although it fits is one whose
longer simulation keeps the bound. A draw whose long simulation lies closer to the bound than the two may differ counts
for neither answer. Both sides are simulated: nothing here was measured on a trainer.
"""

import argparse
import multiprocessing
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.reporting import Target, finish
from storage.fleet_records import AdmittedRun
from tasks.sharing.admission_forecast import predict_slowdowns
from tasks.sharing.shared_cycles import Conditions, share_trainer

SLOWDOWN_MAX = 1.1
OFF_MAX = 0.03
LONG_SEEDS = range(1000, 1004)
LONG_ITERATIONS = 1000
LOAD_MAX = 1.3
BINS = ((1.0, 1.05), (1.05, 1.1), (1.1, 1.3), (1.3, 10.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A host with its runs, the newcomer last."""

    runs: tuple[AdmittedRun, ...]
    given: Conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The worst slowdown of the runs on one host, as predicted and in the long simulation. load: of all runs."""

    predicted: float
    long: float
    load: float
    runs: int

    @property
    def off(self) -> float:
        return abs(self.predicted - self.long)

    @property
    def is_wrongly_refused(self) -> bool:
        return self.predicted > SLOWDOWN_MAX and self.long <= SLOWDOWN_MAX - OFF_MAX

    @property
    def is_wrongly_admitted(self) -> bool:
        return self.predicted <= SLOWDOWN_MAX and self.long > SLOWDOWN_MAX + OFF_MAX


def draw(number: int) -> Drawn:
    """One to six runs of unlike cycles, synchronous or one step off, that need up to 1.3 of the trainer's time."""
    rng = random.Random(number)
    count, load = rng.randint(2, 6), rng.uniform(0.1, LOAD_MAX)
    weights = [rng.uniform(0.3, 1.0) for _ in range(count)]
    runs = []
    for position, weight in enumerate(weights):
        cycle_s = rng.uniform(120.0, 1200.0)
        part = min(0.8, load * weight / sum(weights))
        runs.append(
            AdmittedRun(
                id=str(position),
                run_url=f"memory://runs/{position}",
                phase_s=part * cycle_s,
                cycle_s=cycle_s,
                state_bytes=0,
                admitted_at_s=0.0,
                share=rng.choice((0.5, 1.0, 1.0, 2.0)),
                rollouts_ahead=rng.randint(0, 1),
            )
        )
    switch_s = rng.choice((0.0, 2.0, 10.0, 30.0))
    return Drawn(runs=tuple(runs), given=Conditions(switch_s=switch_s, slowdown_max=SLOWDOWN_MAX))


def compare(number: int) -> Compared:
    """Predict one draw as admission does, and simulate it for long."""
    drawn = draw(number)
    predicted = predict_slowdowns(drawn.runs, drawn.given)
    long = [share_trainer(drawn.runs, drawn.given, iterations=LONG_ITERATIONS, seed=seed).runs for seed in LONG_SEEDS]
    worst = max(statistics.fmean(runs[place].slowdown for runs in long) for place in range(len(drawn.runs)))
    load = sum(run.load for run in drawn.runs)
    return Compared(predicted=max(predicted.values()), long=worst, load=load, runs=len(drawn.runs))


def report(found: Sequence[Compared], *, as_json: bool) -> None:
    """Print how far predictions are off, by the slowdown of the long simulation."""
    rows = []
    for least, most in BINS:
        these = [each for each in found if least <= each.long < most]
        offs = sorted(each.off for each in these) or [0.0]
        rows.append(
            {
                "slowdown": f"{least:g} to {most:g}",
                "fleets": len(these),
                "admitted": sum(each.predicted <= SLOWDOWN_MAX for each in these),
                "off, median": statistics.median(offs),
                "off, most": offs[-1],
            }
        )
    targets = [
        Target("worst_slowdown_off_by_at_most", max(each.off for each in found), f"<= {OFF_MAX}"),
        Target("refused_although_they_fit", float(sum(each.is_wrongly_refused for each in found)), "== 0"),
        Target("admitted_although_too_slow", float(sum(each.is_wrongly_admitted for each in found)), "== 0"),
    ]
    notes = {"fleets": len(found), "slowdown_max": SLOWDOWN_MAX, "longer": f"{len(LONG_SEEDS)} x {LONG_ITERATIONS}"}
    finish("sharing_admission", rows, targets, as_json=as_json, notes=notes)


def main() -> None:
    """Parse, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, default=500)
    parser.add_argument("--workers", type=int, default=2, help="processes; 0: this one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.fleets < 1:
        parser.error(f"--fleets: value {options.fleets}; allowed: at least 1")
    if options.workers == 0:
        found = [compare(number) for number in range(options.fleets)]
    else:
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(compare, range(options.fleets), chunksize=10))
    report(found, as_json=options.json)


if __name__ == "__main__":
    main()
