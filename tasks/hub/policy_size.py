"""The size of a run's models on the hub, without a download of weights: config.json, and the number of parameters.

A run keeps the commit of its beginning.
"""

from dataclasses import dataclass
from pathlib import Path

from storage.records.run import read_run
from storage.records.sources import HubSource
from storage.stores.connect import connect
from storage.stores.store import ObjectMissing, StoreDenied, StoreUnavailable
from tasks.configuration.run_config import RunConfig
from tasks.hub.repositories import HubError, commit_of, count_parameters, model_config


@dataclass(frozen=True)
class HubModel:
    """A model of a configuration by its id on the hub.

    Attributes:
        repo: The id.
        revision: As configured.
        field: The field of the id.
    """

    repo: str
    revision: str | None
    field: str


def policy_of(config: RunConfig) -> HubModel:
    """The policy, whose path is an id."""
    return HubModel(config.policy.path, config.policy.revision, "policy.path")


def config_folder(config: RunConfig, model: HubModel) -> Path:
    """A folder that holds at least the config.json of a model; nothing else is downloaded.

    Without access to the run's store, the folder belongs to the commit with which a run would begin now. Raises
    HubError.
    """
    try:
        return model_config(model.repo, _commit(config, model), model.field)
    except (StoreDenied, StoreUnavailable) as unread:
        try:
            return model_config(model.repo, _newest(model), model.field)
        except HubError as error:
            raise HubError(f"{error}; the commit of the run is not known: {unread}") from None


def hub_parameters(config: RunConfig, model: HubModel) -> int:
    """The number of a model's parameters; no weights are downloaded.

    Raises HubError, ModelError of a cache, StoreDenied and StoreUnavailable.
    """
    return count_parameters(model.repo, _commit(config, model), model.field)


def _commit(config: RunConfig, model: HubModel) -> str:
    """The commit of the run's beginning, or for a new run the newest; raises StoreDenied and StoreUnavailable."""
    asked = HubSource(repo=model.repo, revision=model.revision, commit="0" * 40)
    try:
        held = read_run(connect(config.run.url)).sources.get(model.field)
    except ObjectMissing:
        held = None
    return held.commit if held is not None and held.asked == asked.asked else _newest(model)


def _newest(model: HubModel) -> str:
    return commit_of("model", model.repo, model.revision, model.field)
