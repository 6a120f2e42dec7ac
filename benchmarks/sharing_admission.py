"""Claim: admission answers as a much longer simulation does, and where it simulates, predicts the same slowdown.

Each draw is one host with runs that are there and a newcomer. What `gleaner fleet admit` predicts is compared with
simulations that are many times as long and have other seeds, and that are repeated until they are surer than the bound
that they judge. A right answer is that of the long simulation. A run that was refused although it fits is one whose
longer simulation keeps the bound by more than predictions may be off. How far the closed form's slowdowns are off is
shown, and bounded only by their answers. Both sides are computed: nothing here was measured on a trainer.

Draws 0 to 499 were looked at while predictions were built, so others judge them. With `--kept FILE` each result is
added to a file, and draws that it holds are not compared again, so that a long run can be divided.
"""

import argparse
import json
import math
import multiprocessing
import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.reporting import Target, finish
from storage.fleet.fleet_records import AdmittedRun
from tasks.sharing.admission_forecast import predict_slowdowns, simulate_until_sure, sure_slowdowns
from tasks.sharing.shared_cycles import Conditions

SLOWDOWN_MAX = 1.1
OFF_MAX = 0.03
RIGHT_MIN = 0.99
FIRST = 1000
LONG_SEEDS = range(1000, 1300)
LONG_ITERATIONS, LONG_SETTLED, LONG_SIMULATIONS = 1000, 200, 6
# The standard error of the slowest run's slowdown, as far as the seeds suffice.
LONG_UNSURE_MAX = 0.003
LOAD_MAX = 1.3
# A run one step off may make up for waits of before, so that its slowdown is a little below 1.
BINS = ((0.9, 1.05), (1.05, 1.1), (1.1, 1.3), (1.3, 10.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A host with its runs, the newcomer last."""

    runs: tuple[AdmittedRun, ...]
    given: Conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The worst slowdown of the runs on one host, as predicted and in the long simulations.

    number: of the draw. load: of all runs. simulated: whether the prediction is, and not the closed form's. repeated:
    how many long simulations there were. unsure: the standard error of `long`.
    """

    number: int
    predicted: float
    long: float
    load: float
    simulated: bool
    repeated: int
    unsure: float

    @property
    def off(self) -> float:
        return abs(self.predicted - self.long)

    @property
    def is_right(self) -> bool:
        return (self.predicted > SLOWDOWN_MAX) == (self.long > SLOWDOWN_MAX)

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
    long = simulate_until_sure(
        drawn.runs,
        drawn.given,
        iterations=LONG_ITERATIONS,
        seeds=LONG_SEEDS,
        step=LONG_SIMULATIONS,
        unsure_max=LONG_UNSURE_MAX,
        settled=LONG_SETTLED,
    )
    slowest = max(long, key=statistics.fmean)
    return Compared(
        number=number,
        predicted=max(predicted.values()),
        long=statistics.fmean(slowest),
        load=sum(run.load for run in drawn.runs),
        simulated=sure_slowdowns(drawn.runs, drawn.given) is None,
        repeated=len(slowest),
        unsure=statistics.stdev(slowest) / math.sqrt(len(slowest)),
    )


def report(found: Sequence[Compared], *, as_json: bool) -> None:
    """Print how far predictions are off, by the slowdown of the long simulation."""
    rows = []
    for least, most in BINS:
        these = [each for each in found if least <= each.long < most]
        offs = {simulated: [each.off for each in these if each.simulated == simulated] for simulated in (True, False)}
        rows.append(
            {
                "slowdown": f"{least:g} to {most:g}",
                "fleets": len(these),
                "admitted": sum(each.predicted <= SLOWDOWN_MAX for each in these),
                "simulated": len(offs[True]),
                "off, median": statistics.median(offs[True] or [0.0]),
                "off, most": max(offs[True], default=0.0),
                "closed form off, median": statistics.median(offs[False] or [0.0]),
                "long simulations, most": max((each.repeated for each in these), default=0),
            }
        )
    offs_simulated = [each.off for each in found if each.simulated]
    targets = [
        Target("right_answers", statistics.fmean(each.is_right for each in found), f">= {RIGHT_MIN}"),
        Target("simulated_slowdown_off_by_at_most", max(offs_simulated, default=0.0), f"<= {OFF_MAX}"),
        Target("refused_although_they_fit", float(sum(each.is_wrongly_refused for each in found)), "== 0"),
        Target("admitted_although_too_slow", float(sum(each.is_wrongly_admitted for each in found)), "== 0"),
    ]
    worst = max(found, key=lambda each: each.off)
    notes = {
        "fleets": len(found),
        "slowdown_max": SLOWDOWN_MAX,
        "draws": f"{min(each.number for each in found)}..{max(each.number for each in found)}",
        "long simulations unsure, most": max(each.unsure for each in found),
        "longer": f"{LONG_SIMULATIONS} to {len(LONG_SEEDS)} x {LONG_ITERATIONS}",
        "most off": f"draw {worst.number}, load {worst.load:.2f}, {worst.predicted:.3f} for {worst.long:.3f}",
    }
    finish("sharing_admission", rows, targets, as_json=as_json, notes=notes)


def main() -> None:
    """Parse, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=FIRST, help="the first draw")
    parser.add_argument("--fleets", type=int, default=500)
    parser.add_argument("--workers", type=int, default=2, help="processes; 0: this one")
    parser.add_argument("--kept", type=Path, help="a file that keeps results")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.fleets < 1:
        parser.error(f"--fleets: value {options.fleets}; allowed: at least 1")
    report(compare_all(range(options.first, options.first + options.fleets), options), as_json=options.json)


def compare_all(numbers: Sequence[int], options: argparse.Namespace) -> list[Compared]:
    """Compare these draws, except those that the file of results holds; a line there that was cut off is the last."""
    kept = {}
    if options.kept is not None and options.kept.exists():
        lines = options.kept.read_text().splitlines(keepends=True)
        kept = {each.number: each for line in lines if line.endswith("\n") for each in [Compared(**json.loads(line))]}
        options.kept.write_text("".join(json.dumps(asdict(each)) + "\n" for each in kept.values()))
    left = [number for number in numbers if number not in kept]
    if options.workers == 0:
        kept |= {each.number: each for each in _keeping(map(compare, left), options.kept)}
    elif left:
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            kept |= {each.number: each for each in _keeping(pool.map(compare, left), options.kept)}
    return [kept[number] for number in numbers]


def _keeping(found: Iterator[Compared], file: Path | None) -> Iterator[Compared]:
    """The same, each added to the file first."""
    for each in found:
        if file is not None:
            with file.open("a") as kept:
                kept.write(json.dumps(asdict(each)) + "\n")
        yield each


if __name__ == "__main__":
    main()
