"""How much the cycles of the runs on each host would grow with a newcomer: pure, by a closed form or by simulation.

The closed form answers where a host clearly keeps up, or clearly does not; a simulation answers near the limit.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.fleet.fleet_records import AdmittedRun
from tasks.sharing.seat_placement import HostRoom
from tasks.sharing.shared_cycles import Conditions, share_trainer

# The closed form answers on a host that is busy for at most BUSY_SURE of the time, if the slowdown beyond 1 is at most
# WITHIN_SURE of the slowdown that the fleet allows; and on any host with at least BEYOND_SURE times the allowed
# slowdown. For 250 drawn hosts at six bounds every such answer agrees with simulations
# (python -m benchmarks.sharing_admission has such hosts).
BUSY_SURE, WITHIN_SURE, BEYOND_SURE = 0.8, 0.6, 2.0
# Share of a wait at a random moment, by the median of the drawn hosts: phases come in turns, and short phases pass
# long phases.
WAIT_IN_TURNS = 0.78
ROUNDS = 100
# A few simulations are enough where the trainer keeps up. On an overloaded host with unlike runs, the order of phases
# falls into lasting patterns: simulations differ by up to 0.1, and many are needed.
SIMULATIONS, SIMULATIONS_MAX = 6, 240
UNSURE_MAX = 0.006
ITERATIONS = 500
# The first iterations on an idle trainer wait less: on overloaded hosts until about the twentieth.
SETTLED = 80
# How fast a state leaves the device or comes back, where no host has measured a switch. A processor under load copied
# 2.5 GB in a second; the bus of a GPU is faster, so the constant errs towards refusing.
COPIED_BYTES_PER_S = 2.5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One host for the newcomer, with the predicted slowdowns.

    Attributes:
        host: The incarnation; empty for a host that could come.
        slowdowns: Cycle time on the host over cycle time alone, by run id.
    """

    host: str
    slowdowns: Mapping[str, float]

    @property
    def worst(self) -> float:
        return max(self.slowdowns.values())

    def beyond(self, slowdown_max: float) -> list[str]:
        """The ids of the runs with a slowdown above `slowdown_max`, the slowest first."""
        slow = [run for run, slowdown in self.slowdowns.items() if slowdown > slowdown_max]
        return sorted(slow, key=lambda run: (-self.slowdowns[run], run))


def predict_slowdowns(runs: Sequence[AdmittedRun], given: Conditions) -> dict[str, float]:
    """The slowdown of each run, by id, if the runs share one host: `sure_slowdowns`, or else the mean of simulations.

    Simulations go on until the standard error of the greatest mean is at most 0.006, up to 240 simulations.
    """
    sure = sure_slowdowns(runs, given)
    if sure is not None:
        return sure
    simulated = simulate_until_sure(
        runs, given, iterations=ITERATIONS, seeds=range(SIMULATIONS_MAX), step=SIMULATIONS, unsure_max=UNSURE_MAX
    )
    return {run.id: statistics.fmean(slowdowns) for run, slowdowns in zip(runs, simulated, strict=True)}


def sure_slowdowns(runs: Sequence[AdmittedRun], given: Conditions) -> dict[str, float] | None:
    """The slowdowns by the closed form if clearly all are within `given.slowdown_max` or clearly not; else None."""
    switch_s = _switch_s(runs, given)
    found = estimated_slowdowns(runs, given)
    over, allowed = max(found.values()) - 1.0, given.slowdown_max - 1.0
    busy = math.fsum((run.phase_s + switch_s) / run.cycle_s for run in runs)
    keeps_up = busy <= BUSY_SURE and over <= WITHIN_SURE * allowed and _hides_waits(runs, given)
    return found if keeps_up or over >= BEYOND_SURE * allowed else None


def estimated_slowdowns(runs: Sequence[AdmittedRun], given: Conditions) -> dict[str, float]:
    """The slowdown of each run, by id, if the runs share one host, by a closed form.

    A due phase finds every competing run at the trainer (training or waiting) with the run's mean share of time there:
    mean value analysis of a closed network of queues (Schweitzer, Int. Conf. Stochastic Control and Optimization 1979).
    """
    switch_s = _switch_s(runs, given)
    taken = [run.phase_s + switch_s for run in runs]
    # What is left of a phase at a random moment in it.
    left = [seconds * (1 + cv * cv) / 2 for seconds, cv in zip(taken, _phase_cvs(runs, given), strict=True)]
    waits = [0.0] * len(runs)
    for _ in range(ROUNDS):
        caused = [
            (rest_s + wait_s) * taken_s / _cycle_s(run, wait_s + switch_s)
            for run, rest_s, wait_s, taken_s in zip(runs, left, waits, taken, strict=True)
        ]
        whole_s = math.fsum(caused)
        waits = [(wait_s + whole_s - own_s) / 2 for wait_s, own_s in zip(waits, caused, strict=True)]
    return {
        run.id: _cycle_s(run, WAIT_IN_TURNS * wait_s + switch_s) / _cycle_s(run, 0.0)
        for run, wait_s in zip(runs, waits, strict=True)
    }


def _switch_s(runs: Sequence[AdmittedRun], given: Conditions) -> float:
    return given.switch_s if len(runs) > 1 else 0.0


def _cycle_s(run: AdmittedRun, waited_s: float) -> float:
    """The cycle of a run whose phase waits for `waited_s`; a run with rollouts ahead generates meanwhile."""
    if run.rollouts_ahead:
        return max(run.cycle_s, waited_s + run.phase_s)
    return run.cycle_s + waited_s


def _hides_waits(runs: Sequence[AdmittedRun], given: Conditions) -> bool:
    """Whether the cycle of each run ahead has room for a whole phase of any competing run; a mean hides rare waits.

    Phases count as two standard deviations longer, and the cycle as one standard deviation of a rollout shorter.
    """
    switch_s = _switch_s(runs, given)
    long_s = [run.phase_s * (1 + 2 * cv) for run, cv in zip(runs, _phase_cvs(runs, given), strict=True)]
    for place, run in enumerate(runs):
        others_s = [other_s for other, other_s in enumerate(long_s) if other != place]
        rollout_cv = given.rollout_cv if run.rollout_cv is None else run.rollout_cv
        short_s = run.cycle_s * (1 - rollout_cv)
        if run.rollouts_ahead and others_s and long_s[place] + max(others_s) + 2 * switch_s > short_s:
            return False
    return True


def _phase_cvs(runs: Sequence[AdmittedRun], given: Conditions) -> list[float]:
    return [given.phase_cv if run.phase_cv is None else run.phase_cv for run in runs]


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
    """The slowdowns of each run, in the order of the runs: one simulation per seed, each counted from `settled` on.

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


def choices(
    newcomer: AdmittedRun, rooms: Sequence[HostRoom], slowdown_max: float, switch_s: float | None
) -> list[Choice]:
    """Predict the slowdowns with the newcomer on each host; the choice with the least worst slowdown is first.

    Ties are decided by host name. switch_s: measured seconds of a switch; None: the time that the largest state takes
    to leave the device and to come back. A host is no choice if the host cannot train the newcomer, or does not hold
    the states of all runs (`HostRoom.holds`): reading a checkpoint in every phase would make switches longer than
    `switch_s`.
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
    """Seconds that a state takes to leave the device and to come back, where no host has measured a switch."""
    return 2 * state_bytes / COPIED_BYTES_PER_S
