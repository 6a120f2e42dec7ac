"""The size of a run's policy on the hub, without a download of weights: config.json, and the number of parameters.

A run keeps the commit of its beginning.
"""

from pathlib import Path

from storage.records.run import read_run
from storage.records.sources import HubSource
from storage.stores.connect import connect
from storage.stores.store import ObjectMissing, StoreDenied, StoreUnavailable
from tasks.configuration.run_config import RunConfig
from tasks.hub.repositories import HubError, commit_of, count_parameters, model_config

_FIELD = "policy.path"


def config_folder(config: RunConfig) -> Path:
    """A folder that holds at least the policy's config.json; nothing else is downloaded.

    Without access to the run's store, the folder belongs to the commit with which a run would begin now. Raises
    HubError.
    """
    try:
        return model_config(config.policy.path, _commit(config), _FIELD)
    except (StoreDenied, StoreUnavailable) as unread:
        try:
            return model_config(config.policy.path, _newest(config), _FIELD)
        except HubError as error:
            raise HubError(f"{error}; the commit of the run is not known: {unread}") from None


def policy_parameters(config: RunConfig) -> int:
    """The number of the policy's parameters; no weights are downloaded.

    Raises HubError, ModelError of a cache, StoreDenied and StoreUnavailable.
    """
    return count_parameters(config.policy.path, _commit(config), _FIELD)


def _commit(config: RunConfig) -> str:
    """The commit of the run's beginning, or for a new run the newest; raises StoreDenied and StoreUnavailable."""
    asked = HubSource(repo=config.policy.path, revision=config.policy.revision, commit="0" * 40)
    try:
        held = read_run(connect(config.run.url)).sources.get(_FIELD)
    except ObjectMissing:
        held = None
    return held.commit if held is not None and held.asked == asked.asked else _newest(config)


def _newest(config: RunConfig) -> str:
    return commit_of("model", config.policy.path, config.policy.revision, _FIELD)
