"""The config.json of a policy that is an id on the hub, for a forecast."""

from dataclasses import replace

from tasks.configuration.run_config import RunConfig
from tasks.forecasting.probe import NoProbe, Probe
from tasks.hub.policy_size import config_folder
from tasks.hub.repositories import HubError, names_repository


def with_model_config(config: RunConfig, probe: Probe | NoProbe) -> RunConfig:
    """The configuration with a policy.path that holds a config.json, unless the model's size is given.

    Raises HubError, unless the run has measured what may do without the size.
    """
    if config.forecast.parameters_billions is not None or not names_repository(config.policy.path):
        return config
    try:
        return replace(config, policy=replace(config.policy, path=str(config_folder(config)), revision=None))
    except HubError as error:
        if isinstance(probe, Probe):
            return config
        raise HubError(f"{error}; a forecast also does with forecast.parameters_billions") from None
