"""What a run's phases and cycles are expected to be before it has any: by a forecast of its configuration."""

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
    """A run on a host of its own: mean seconds of a phase, and from one phase to the next.

    rollout_cv, phase_cv: coefficients of variation of the time in which it generates, and of a phase. A run ahead
    generates for a whole cycle, others for the rest of one.
    """

    phase_s: float
    cycle_s: float
    rollout_cv: float
    phase_cv: float


def expected_profile(config: RunConfig) -> PhaseProfile:
    """The profile of the configured setup on a host of its own, where no state ever has to be switched.

    Raises ValueError or LookupError, which names the missing or wrong field, for a configuration that cannot be
    forecast or whose trainer is not shared; Stalled, and TraceError and ScenarioError for files that cannot be used.
    """
    inputs = gather(config, NoProbe(reason="the run has no iteration yet"))
    scenario = configured(config, inputs).scenario
    if config.trainer.placement != "shared":
        raise ValueError(f"trainer.placement: value {config.trainer.placement!r}; allowed: 'shared'")
    scenario = replace(scenario, trainer=replace(scenario.trainer, load_s=0.0))
    runs = [simulate(scenario, seed=seed) for seed in range(SEEDS_MAX)]
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
