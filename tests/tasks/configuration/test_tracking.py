"""What may be said about trackers, and what is found out before anything is paid for."""

import sys

import pytest
from click.testing import CliRunner

from gleaner import main
from tasks.configuration.run_config import ConfigError, digest, parse
from tasks.configuration.tracking import DISTRIBUTIONS, TrackingConfig
from tests.small_run import everything, memory_store, plan_iteration

MINIMAL = {
    "run": {"url": "memory://trackers"},
    "policy": {"path": "model"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "arithmetic"}],
}


@pytest.fixture
def no_libraries(monkeypatch, tmp_path):
    """An environment without any of the trackers' libraries; the folder it looks for them in."""
    for backend in DISTRIBUTIONS:
        monkeypatch.delitem(sys.modules, backend, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_trackers_are_no_part_of_a_runs_identity():
    changed = parse(MINIMAL | {"tracking": {"backends": ["wandb", "mlflow"], "project": "p", "name": "n"}})
    assert changed.tracking == TrackingConfig(backends=("wandb", "mlflow"), project="p", name="n")
    assert digest(changed) == digest(parse(MINIMAL))


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        ({"backends": ["wandb", "wandbb"]}, r"tracking\.backends\.1: \"wandbb\" given; .*'tensorboard', 'wandb'"),
        ({"backends": ["wandb", "wandb"]}, r"tracking\.backends: value .*; allowed: each at most once"),
        ({"backends": "wandb"}, r"tracking\.backends: \"wandb\" given"),
        ({"project": ""}, r"tracking\.project: .*at least 1 character"),
        ({"api": "x"}, r"tracking\.api: unknown field; allowed: backends, project, name"),
        ({"api_key": "x"}, r"tracking\.api_key: .* given; allowed: nothing secret"),
    ],
)
def test_what_is_not_understood_is_refused(tracking, message):
    with pytest.raises(ConfigError, match=message):
        parse(MINIMAL | {"tracking": tracking})


@pytest.mark.parametrize("backend", DISTRIBUTIONS)
def test_a_library_that_is_missing_is_named_with_what_to_install(no_libraries, backend):
    TrackingConfig().check_libraries()
    (no_libraries / backend).mkdir()  # as W&B leaves one; not a library
    message = rf"tracking\.backends: value '{backend}'; .*: pip install {DISTRIBUTIONS[backend]}$"
    with pytest.raises(ValueError, match=message):
        TrackingConfig(backends=(backend,)).check_libraries()
    (no_libraries / backend / "__init__.py").touch()
    TrackingConfig(backends=(backend,)).check_libraries()


def test_a_plan_without_the_library_creates_nothing(no_libraries):
    store = memory_store("trackers")
    with pytest.raises(ValueError, match="pip install tensorboard"):
        plan_iteration(parse(MINIMAL | {"tracking": {"backends": ["tensorboard"]}}))
    assert everything(store) == {}


def test_check_refuses_a_tracker_without_its_library(no_libraries):
    file = no_libraries / "run.yaml"
    file.write_text(str(MINIMAL | {"tracking": {"backends": ["mlflow"]}}))
    result = CliRunner().invoke(main, ["check", str(file)])
    assert result.exit_code == 1
    assert result.stderr == (
        "gleaner: tracking.backends: value 'mlflow'; its library is not installed here: pip install mlflow-skinny\n"
    )
