"""What a run's phases and cycles are expected to be before it has any: by a forecast of its configuration."""

from tasks.configuration.run_config import RunConfig
from tasks.forecasting.inputs import gather
from tasks.forecasting.phases import PhaseProfile, alone, profile
from tasks.forecasting.probe import NoProbe
from tasks.forecasting.setups import configured


def expected_profile(config: RunConfig) -> PhaseProfile:
    """The profile of the configured setup on a host of its own.

    Raises ValueError or LookupError, which names the missing or wrong field, for a configuration that cannot be
    forecast or whose trainer is not shared; Stalled, and TraceError and ScenarioError for files that cannot be used.
    """
    inputs = gather(config, NoProbe(reason="the run has no iteration yet"))
    scenario = configured(config, inputs).scenario
    if scenario.trainer.phase is None:
        raise ValueError(f"trainer.placement: value {config.trainer.placement!r}; allowed: 'shared'")
    return profile(alone(scenario, scenario.trainer.phase), config.forecast.seeds)
