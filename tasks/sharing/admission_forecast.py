"""What admitting a run would do to the cycles of the runs on each host: pure, by simulation."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.fleet_records import AdmittedRun
from tasks.sharing.seat_placement import Room
from tasks.sharing.shared_cycles import Conditions, share_trainer

# A few simulations are sure enough where the trainer keeps up. On an overloaded host with unlike runs, the order of
# phases falls into patterns that last, so that simulations differ by up to 0.1, and many are needed
# (python -m benchmarks.sharing_admission).
SIMULATIONS, SIMULATIONS_MAX = 6, 240
UNSURE_MAX = 0.006
ITERATIONS = 500
# The first iterations on an idle trainer wait less: those of overloaded hosts did until about the twentieth.
SETTLED = 80
# How fast a state leaves the device or comes back, where no host has measured it. A processor under load copied 2.5 GB
# in a second; the bus of a GPU is faster, so that this errs towards refusing.
COPIED_BYTES_PER_S = 2.5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One host for the newcomer, and how many times as long each run's cycle would then take, by run id.

    host: the incarnation; empty: a host that could come.
    """

    host: str
    slowdowns: Mapping[str, float]

    @property
    def worst(self) -> float:
        return max(self.slowdowns.values())

    def beyond(self, slowdown_max: float) -> list[str]:
        """The ids of the runs that would be slowed down by more, the slowest first."""
        slow = [run for run, slowdown in self.slowdowns.items() if slowdown > slowdown_max]
        return sorted(slow, key=lambda run: (-self.slowdowns[run], run))


def predict_slowdowns(runs: Sequence[AdmittedRun], given: Conditions) -> dict[str, float]:
    """The mean slowdown of each run over simulations, by id, if these runs share one host.

    There are so many simulations that the standard error of the greatest mean is 0.006, and at most 240. That takes
    less than a second for most hosts, and up to half a minute for overloaded ones.
    """
    simulated = simulate_until_sure(
        runs, given, iterations=ITERATIONS, seeds=range(SIMULATIONS_MAX), step=SIMULATIONS, unsure_max=UNSURE_MAX
    )
    return {run.id: statistics.fmean(slowdowns) for run, slowdowns in zip(runs, simulated, strict=True)}


def simulate_until_sure(
    runs: Sequence[AdmittedRun],
    given: Conditions,
    *,
    iterations: int,
    seeds: Sequence[int],
    step: int,
    unsure_max: float,
    settled: int = SETTLED,
) -> list[list[float]]:
    """The slowdowns of each run, in the order of the runs, in one simulation for each seed, once the host has settled.

    The seeds are used `step` at a time, until the standard error of the slowest run's mean is at most `unsure_max`, or
    no seed is left.
    """
    found: list[list[float]] = [[] for _ in runs]
    for first in range(0, len(seeds), step):
        for seed in seeds[first : first + step]:
            simulated = share_trainer(runs, given, iterations=iterations, seed=seed, settled=settled)
            for slowdowns, run in zip(found, simulated.runs, strict=True):
                slowdowns.append(run.slowdown)
        slowest = max(found, key=statistics.fmean)
        if statistics.stdev(slowest) <= unsure_max * math.sqrt(len(slowest)):
            break
    return found


def choices(newcomer: AdmittedRun, rooms: Sequence[Room], slowdown_max: float, switch_s: float | None) -> list[Choice]:
    """Simulate the newcomer on each host; the choice with the least worst slowdown is first, ties by name.

    switch_s: as measured; None: as long as the largest state takes to leave and to come back. A host that cannot train
    the newcomer is no choice. One that does not hold all states (`Room.holds`) is none either, because a state that is
    read from its checkpoint in every phase makes each switch longer than that.
    """
    found = []
    for room in rooms:
        runs = (*room.seated, newcomer)
        if room.can_train(newcomer) and room.holds(runs):
            longest_s = expected_switch_s(max(run.state_bytes for run in runs))
            given = Conditions(switch_s=longest_s if switch_s is None else switch_s, slowdown_max=slowdown_max)
            found.append(Choice(host=room.host, slowdowns=predict_slowdowns(runs, given)))
    return sorted(found, key=lambda choice: (choice.worst, choice.host))


def expected_switch_s(state_bytes: float) -> float:
    """How long a state of this size takes to leave the device and to come back, where no host has measured it."""
    return 2 * state_bytes / COPIED_BYTES_PER_S
