"""Fixtures shared by all test packages."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import azurite_server, radosgw_server
from tests.s3_server import S3_BUCKET, SerialisedMoto, make_bucket, moto_server, point_to

# Nearly all that a test process holds is imported code and stays. To look through it less often saves a fifteenth of
# the processor's time.
gc.set_threshold(100_000, 50, 100)

# Where the environment forbids compiled modules, as in images, each process of a test would compile ours again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

HERE = Path(__file__).parent
# The files that take ten seconds of a processor or more, with the processes that they start; the longest first. Whole
# runs, in tests/workflows, come next.
LONGEST = (
    "tasks/learning/test_replaying.py",
    "benchmarks/test_seeds.py",
    "tasks/sharing/test_workers_of_ranks.py",
    "tasks/sampling/engines/test_kernels.py",
    "tasks/sampling/engines/test_torch_engine.py",
    "simulation/test_histories.py",
    "workflows/test_spine.py",
    "tasks/sharing/test_phase_trainer.py",
    "tasks/sharing/test_process_workers.py",
    "test_gleaner.py",
    "hostile/test_own_rewards.py",
    "simulation/test_fleet_histories.py",
    "tasks/learning/test_sharded.py",
    "tasks/learning/test_train_iteration_ranks.py",
    "storage/stores/test_s3_deadlines.py",
    "storage/stores/test_s3.py",
    "workflows/test_absent_crew.py",
    "tasks/learning/test_missed_ranks.py",
    "tasks/learning/test_train_iteration.py",
    "tasks/learning/test_trainer_algorithms.py",
    "hostile/test_fleets.py",
    "tasks/learning/test_published_adapters.py",
    "benchmarks/test_gpu_failures.py",
    "tasks/learning/test_beside_rollout.py",
    "hostile/test_hubs.py",
    "hostile/test_forecast.py",
)
assert all((Path(__file__).parent / name).exists() for name in LONGEST)

# How long an example takes says more about the machine's other work than about us.
for profile, examples in (("fast", 10), ("gleaner", 30), ("all", 60), ("thorough", 1000)):
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
    """The longest files first: a file stays in one process, and a long one at the end would leave the others idle."""
    last = len(LONGEST)
    rank = {file: number for number, file in enumerate(LONGEST)}
    items.sort(
        key=lambda item: rank.get(item.path.relative_to(HERE).as_posix(), last + ("workflows" not in item.path.parts))
    )
