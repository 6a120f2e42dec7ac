"""What admitting a run would do to the cycles of the runs on each host: pure, by simulation."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.fleet_records import AdmittedRun
from tasks.sharing.seat_placement import Room
from tasks.sharing.shared_cycles import Conditions, share_trainer

# Up to a slowdown of 1.3 they come within 0.01 of a long simulation (python -m benchmarks.sharing_admission).
SEEDS = range(6)
ITERATIONS = 250
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
    """The mean slowdown of each run over the simulations, by id, if these runs share one host."""
    simulated = [share_trainer(runs, given, iterations=ITERATIONS, seed=seed).runs for seed in SEEDS]
    return {run.id: statistics.fmean(each[place].slowdown for each in simulated) for place, run in enumerate(runs)}


def choices(newcomer: AdmittedRun, rooms: Sequence[Room], slowdown_max: float, switch_s: float | None) -> list[Choice]:
    """Simulate the newcomer on each host; the choice with the least worst slowdown is first, ties by name.

    switch_s: as measured; None: as long as the largest state takes to leave and to come back. A host that does not hold
    all states (`Room.holds`) is no choice, because a state that is read from its checkpoint in every phase makes each
    switch longer than that.
    """
    found = []
    for room in rooms:
        runs = (*room.seated, newcomer)
        if room.holds(runs):
            longest_s = 2 * max(run.state_bytes for run in runs) / COPIED_BYTES_PER_S
            given = Conditions(switch_s=longest_s if switch_s is None else switch_s, slowdown_max=slowdown_max)
            found.append(Choice(host=room.host, slowdowns=predict_slowdowns(runs, given)))
    return sorted(found, key=lambda choice: (choice.worst, choice.host))
