"""What it takes to have the trainer's machines for the train phases only, beside other runs; by simulation, no IO.

A run alone tells how long its phases and cycles are. With these, production's order of phases is simulated for all runs
that share the machines (tasks.sharing.shared_cycles), and the run is simulated again with the waits found there.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from storage.fleet_records import AdmittedRun
from storage.forecast_records import SharingForecast
from storage.records import TRAIN_POOL
from tasks.forecasting.scenario import PhaseScenario, Scenario
from tasks.forecasting.simulate import simulate
from tasks.sharing.shared_cycles import Conditions, saving_bound, share_trainer

# The run itself, among those that share its trainer.
THIS_RUN = "this run"
SEEDS_MAX = 3
# Of each run; those before the host has settled do not count (tasks.sharing.admission_forecast).
ITERATIONS, SETTLED = 300, 80
PASSES = 3
# Of the phase alone: with other runs a phase waits less for its last groups, but has to compute.
SHORTEST = 0.01


class NoIterationError(ValueError):
    """No iteration of a simulated run ended, so that nothing is known of its phases."""


@dataclass(frozen=True, kw_only=True)
class Sharers:
    """The runs with which this one shares the trainer's machines.

    alike: how many that are like it. others: those of a fleet that are not. slowdown_max: the fleet's. switch_s: as its
    hosts measured it; None: as estimated from the size of the run's state.
    """

    alike: int = 0
    others: tuple[AdmittedRun, ...] = ()
    slowdown_max: float = 1.1
    switch_s: float | None = None

    @property
    def runs(self) -> int:
        """All of them, this one included."""
        return 1 + self.alike + len(self.others)


@dataclass(frozen=True, kw_only=True)
class PhaseProfile:
    """A run with a trainer of its own that is there for its phases: mean seconds of a phase and from one to the next.

    rollout_cv, phase_cv: coefficients of variation of the time in which it generates, and of a phase. A run ahead
    generates for a whole cycle, others for the rest of one.
    """

    phase_s: float
    cycle_s: float
    rollout_cv: float
    phase_cv: float


def profile(scenario: Scenario, seeds: int) -> PhaseProfile:
    """The profile of a scenario whose trainer has a phase. Raises NoIterationError, and as `simulate`."""
    runs = [simulate(scenario, seed=seed) for seed in range(min(seeds, SEEDS_MAX))]
    iterations = [each for run in runs for each in run.iterations[len(run.iterations) // 2 :]]
    if not iterations:
        raise NoIterationError(next((run.stopped for run in runs if run.stopped), "no iteration ended"))
    phases_s = [each.process_s(TRAIN_POOL) for each in iterations]
    cycles_s = [each.duration_s for each in iterations]
    if scenario.policy.max_staleness:
        rollouts_s = cycles_s
    else:
        rollouts_s = [cycle_s - phase_s for cycle_s, phase_s in zip(cycles_s, phases_s, strict=True)]
    return PhaseProfile(
        phase_s=statistics.fmean(phases_s),
        cycle_s=statistics.fmean(cycles_s),
        rollout_cv=_variation(rollouts_s),
        phase_cv=_variation(phases_s),
    )


def alone(scenario: Scenario, phase: PhaseScenario) -> Scenario:
    """The scenario with machines that wait for its phases; on a host of its own no state ever has to be switched."""
    trainer = scenario.trainer
    load_s = 0.0 if phase.publishes_beside else trainer.load_s
    mine = replace(phase, waits_s=(), idle_share=0.0)
    return replace(scenario, trainer=replace(trainer, phase=mine, load_s=load_s))


def shared(scenario: Scenario, phase: PhaseScenario, sharers: Sharers, seeds: int) -> tuple[Scenario, SharingForecast]:
    """The scenario with what its phases wait for other runs' and what it pays of idle machines, and what sharing does.

    The time in which no run has the machines is paid for by all runs by share, as a fleet bills it. With
    `publishes_beside`, trainer.load_s is what a switch between runs takes; a run alone needs none. A phase that had to
    wait finds more groups recorded and is shorter, which shortens the waits, so both are found in turns. Raises as
    `profile`.
    """
    if phase.publishes_beside:
        switch_s = scenario.trainer.load_s if sharers.switch_s is None else sharers.switch_s
        load_s = switch_s if sharers.runs > 1 else 0.0
        scenario = replace(scenario, trainer=replace(scenario.trainer, load_s=load_s))
    unshared = within = profile(alone(scenario, phase), seeds)
    run = _run_of(unshared, scenario)
    for _ in range(PASSES):
        runs = (run, *(replace(run, id=f"like it, {number}") for number in range(sharers.alike)), *sharers.others)
        given = Conditions(
            switch_s=_switch_s(scenario, phase),
            between_s=_between_s(scenario, phase),
            slowdown_max=sharers.slowdown_max,
        )
        together = share_trainer(runs, given, iterations=ITERATIONS, seed=0, settled=SETTLED)
        idle_share = together.part("idle") * run.share / sum(each.share for each in runs)
        waiting = replace(phase, waits_s=tuple(sorted(together.runs[0].waited_s)), idle_share=idle_share)
        placed = replace(scenario, trainer=replace(scenario.trainer, phase=waiting))
        within = profile(placed, seeds)
        phase_s = max(within.phase_s - _switch_s(scenario, phase), SHORTEST * unshared.phase_s)
        # One that runs ahead of its training generates for a whole cycle.
        shorter_s = 0.0 if run.rollouts_ahead else run.phase_s - phase_s
        run = replace(run, phase_s=phase_s, cycle_s=run.cycle_s - shorter_s)
    return placed, SharingForecast(
        runs=len(runs),
        slowdown=within.cycle_s / unshared.cycle_s,
        slowdown_others=max((each.slowdown for each in together.runs[1:]), default=1.0),
        idle=together.part("idle"),
        saving_max=saving_bound(len(runs), _rollout_gpus(scenario), scenario.trainer.gpus),
    )


def _run_of(found: PhaseProfile, scenario: Scenario) -> AdmittedRun:
    """The run as its fleet would know it."""
    return AdmittedRun(
        id=THIS_RUN,
        run_url="",
        phase_s=found.phase_s,
        cycle_s=found.cycle_s,
        state_bytes=0,
        admitted_at_s=0.0,
        rollouts_ahead=scenario.policy.max_staleness,
        rollout_cv=found.rollout_cv,
        phase_cv=found.phase_cv,
    )


def _switch_s(scenario: Scenario, phase: PhaseScenario) -> float:
    """What a host needs between the phases of two runs; a pod loads within its phase."""
    return scenario.trainer.load_s if phase.publishes_beside else 0.0


def _between_s(scenario: Scenario, phase: PhaseScenario) -> float:
    """From the end of a phase, which for a pod is that of its publication, until the run's next phase may be due."""
    trainer = scenario.trainer
    return trainer.control_s + (trainer.train_fixed_s if phase.publishes_beside else 0.0)


def _rollout_gpus(scenario: Scenario) -> float:
    return sum(pool.count * pool.gpus for pool in scenario.pools)


def _variation(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if len(values) > 1 and mean > 0 else 0.0
