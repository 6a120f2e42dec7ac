"""Fixtures shared by all test packages."""

import gc
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import azurite_server, radosgw_server
from tests.s3_server import S3_BUCKET, SerialisedMoto, make_bucket, moto_server, point_to

# Nearly all that a test process holds is imported code and stays. To look through it less often saves a fifteenth of
# the processor's time.
gc.set_threshold(100_000, 50, 100)

# How long an example takes says more about the machine's other work than about us.
for profile, examples in (("fast", 10), ("gleaner", 60), ("thorough", 1000)):
    hypothesis.settings.register_profile(profile, deadline=None, max_examples=examples)
hypothesis.settings.load_profile("gleaner")


@pytest.fixture(scope="module", autouse=True)
def _imported_is_not_looked_through() -> None:
    """Take what earlier files have imported and kept out of garbage collection.

    Production collects after every training. Late in the suite that took ten times as long as the training.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def few_simulations() -> Iterator[None]:
    """Forecasts simulate two seeds of three iterations."""
    from tests import forecast_documents  # noqa: PLC0415 - few tests need it

    with forecast_documents.few_simulations():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random model, which tests only read."""
    from tests.small_run import model_directory  # noqa: PLC0415 - imports transformers, which few tests need

    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[SerialisedMoto]:
    """A running S3 server with one bucket; the environment points to it until the end of the session."""
    with moto_server() as (endpoint, application), pytest.MonkeyPatch.context() as environment:
        point_to(endpoint, environment)
        # Listings of a few keys then already have several pages.
        environment.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "50")
        make_bucket(endpoint)
        yield application


@pytest.fixture(scope="session")
def s3_url(s3_server: SerialisedMoto) -> str:
    """URL of a bucket on a running S3 server. Tests add a prefix of their own."""
    return f"s3://{S3_BUCKET}"


@pytest.fixture(scope="session")
def radosgw_endpoint() -> Iterator[str]:
    """A running radosgw with one bucket, or a skip that says what to install."""
    reason = radosgw_server.why_not()
    if reason is not None:
        pytest.skip(reason)
    with radosgw_server.radosgw_server() as endpoint:
        with pytest.MonkeyPatch.context() as environment:
            point_to(endpoint, environment)
            make_bucket(endpoint)
        yield endpoint


@pytest.fixture
def radosgw_url(radosgw_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a bucket on radosgw, where the environment points for one test. Tests add a prefix of their own."""
    point_to(radosgw_endpoint, monkeypatch)
    return f"s3://{S3_BUCKET}"


@pytest.fixture(scope="session")
def azurite_endpoint() -> Iterator[str]:
    """A running Azurite with one container, or a skip that says what to install."""
    pytest.importorskip("obstore")
    if azurite_server.program() is None:
        pytest.skip(
            "Azurite is not installed: npm install azurite, and name node_modules/.bin/azurite-blob in AZURITE_BLOB"
        )
    with azurite_server.azurite_server() as endpoint:
        yield endpoint


@pytest.fixture
def azurite_url(azurite_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a container on Azurite, where the environment points for one test. Tests add a prefix of their own."""
    azurite_server.point_to(azurite_endpoint, monkeypatch)
    return f"az://{azurite_server.CONTAINER}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first: a file stays in one process, and a long one at the end would leave the other processes idle."""
    items.sort(key=lambda item: "workflows" not in item.path.parts)
