"""A run with one committed iteration, for the tests of evaluations."""

from pathlib import Path

import pytest

from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig
from tests.evaluated_run import EVALUATION, URL, trained_run
from tests.small_run import OWN_REWARD, config, memory_store


@pytest.fixture(scope="session")
def trained(model: Path) -> dict[str, bytes]:
    """The run's objects by key."""
    return trained_run(model)


@pytest.fixture
def store(trained: dict[str, bytes]) -> ObjectStore:
    """The run's store, whose url is URL, for one test."""
    store = memory_store("evaluate")
    for key, body in trained.items():
        store.put(key, body)
    return store


@pytest.fixture
def settings(model: Path) -> RunConfig:
    """The run's configuration with the section `evaluation`."""
    return config(URL, model, rewards=OWN_REWARD, evaluation=EVALUATION)
