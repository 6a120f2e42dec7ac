"""The expected phases and cycles of a run without iterations, by a forecast of the configuration."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from storage.records.records import TRAIN_POOL
from tasks.configuration.run_config import RunConfig
from tasks.forecasting.inputs import gather
from tasks.forecasting.probe import NoProbe
from tasks.forecasting.setups import configured
from tasks.forecasting.simulate import simulate

SEEDS_MAX = 3


@dataclass(frozen=True, kw_only=True)
class PhaseProfile:
    """The cycle of a run on a host of its own.

    Attributes:
        phase_s: mean seconds of a phase.
        cycle_s: mean seconds from phase to phase.
        rollout_cv: coefficient of variation of the seconds of generating: a whole cycle for a run with max_staleness
            above 0, and else the cycle without the phase.
        phase_cv: coefficient of variation of the seconds of a phase.
    """

    phase_s: float
    cycle_s: float
    rollout_cv: float
    phase_cv: float


def expected_profile(config: RunConfig) -> PhaseProfile:
    """The profile of the configured setup on a host of its own, without switches of states.

    Raises ValueError or LookupError with the missing or wrong field for a configuration without a possible forecast or
    without a shared trainer; Stalled; and TraceError and ScenarioError for files that cannot be used.
    """
    inputs = gather(config, NoProbe(reason="the run has no iteration yet"))
    scenario = configured(config, inputs).scenario
    if config.trainer.placement != "shared":
        raise ValueError(f"trainer.placement: value {config.trainer.placement!r}; allowed: 'shared'")
    scenario = replace(scenario, trainer=replace(scenario.trainer, load_s=0.0))
    runs = [simulate(scenario, seed=seed) for seed in range(min(config.forecast.seeds, SEEDS_MAX))]
    iterations = [each for run in runs for each in run.iterations[len(run.iterations) // 2 :]]
    if not iterations:
        raise ValueError(next((run.stopped for run in runs if run.stopped), "no iteration ended"))
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


def _variation(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if len(values) > 1 and mean > 0 else 0.0
