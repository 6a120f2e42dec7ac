"""The config.json of a policy that is an id on the hub, for a forecast."""

from dataclasses import replace

from tasks.configuration.run_config import RunConfig
from tasks.forecasting.probe import NoProbe, Probe
from tasks.hub.repositories import HubError, names_repository
from tasks.preparing.at_hand import inputs_of_run


def with_model_config(config: RunConfig, probe: Probe | NoProbe) -> RunConfig:
    """The configuration with a policy.path that holds a config.json, unless the model's size is given.

    Raises HubError, unless the run has measured what may do without the size.
    """
    if config.forecast.parameters_billions is not None or not names_repository(config.policy.path):
        return config
    with inputs_of_run(config.run.url) as inputs:
        try:
            return replace(config, policy=inputs.policy_config(config.policy))
        except HubError as error:
            if isinstance(probe, Probe):
                return config
            raise HubError(f"{error}; a forecast also does with forecast.parameters_billions") from None
