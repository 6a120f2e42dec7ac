"""Trackers: none can fail or hold up a run, none learns a secret by us; and the real ones, where they are installed."""

import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.configuration.tracking import TrackingConfig
from tasks.reporting import tracking
from tasks.reporting.tracking import (
    TRACKERS,
    TrackedIteration,
    log_to_mlflow,
    log_to_tensorboard,
    log_to_wandb,
    track,
    tracked_evaluation,
    tracked_iteration,
    without_secrets,
)
from tests.tasks.reporting.test_metrics_lines import evaluation, report

RUN_ID = "0123456789abcdef" * 2
METRICS = {"reward": 0.25, "completions/mean_length": 3.0, "kl": float("nan"), "val/pass@1": 0.5}


def entry(directory, iteration=0, **metrics):
    return TrackedIteration(
        run_id=RUN_ID,
        project="project",
        name="a run",
        directory=Path(directory),
        iteration=iteration,
        committed_at_s=1000.5 + iteration,
        metrics=metrics or METRICS,
    )


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/team/run-7", "run-7"),
        ("/home/me/runs/demo/", "demo"),
        ("memory://x", "x"),
        ("/", "run"),
    ],
)
def test_a_run_is_called_by_the_last_part_of_its_url(url, name):
    told = tracked_iteration(report(3, reward=0.5), TrackingConfig(), run_id=RUN_ID, run_url=url)
    assert (told.name, told.project, told.iteration, told.committed_at_s) == (name, "gleaner", 3, 103.5)
    assert told.metrics == {"reward": 0.5}
    named = TrackingConfig(name="mine")
    assert tracked_iteration(report(3), named, run_id=RUN_ID, run_url=url).name == "mine"


def test_an_evaluation_is_a_run_of_its_own_whose_steps_are_weight_versions():
    config = TrackingConfig(project="p")
    told = tracked_evaluation(evaluation(4, "ab", reward=0.5), config, run_id=RUN_ID, run_url="s3://bucket/run-7")
    assert (told.run_id, told.name, told.project) == (f"{RUN_ID}ab", "run-7-val-ab", "p")
    assert (told.iteration, told.committed_at_s, told.metrics) == (4, 7.0, {"reward": 0.5})


@pytest.mark.parametrize("error", [RuntimeError("no\nluck"), SystemExit("no luck"), KeyboardInterrupt("no luck")])
def test_one_that_fails_is_a_warning_and_the_others_are_told(tmp_path, caplog, error):
    def fails(_):
        raise error

    told = []
    track(entry(tmp_path, 4), {"wandb": fails, "mlflow": told.append})
    assert told == [entry(tmp_path, 4)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"wandb may lack iteration 4: {type(error).__name__}: no luck" in caplog.text


def test_one_that_hangs_is_left_behind_and_asked_again_when_it_is_back(tmp_path, caplog):
    back = threading.Event()
    told = []

    def hangs(iteration):
        told.append(iteration.iteration)
        assert back.wait(600)

    began_s = time.monotonic()
    track(entry(tmp_path, 0), {"wandb": hangs, "mlflow": hangs}, time_limit_s=0.3)
    assert time.monotonic() - began_s < 300  # both together had the 0.3 s; alone they would have waited for 600
    assert "wandb may lack iteration 0: no answer within 0.3 s" in caplog.text
    assert "mlflow may lack iteration 0: no answer within 0.3 s" in caplog.text
    track(entry(tmp_path, 1), {"wandb": hangs}, time_limit_s=0.3)
    assert "wandb may lack iteration 1: it still hangs from an earlier one" in caplog.text
    assert told == [0, 0]
    back.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tracking-"):
            thread.join(300)
    caplog.clear()
    track(entry(tmp_path, 2), {"wandb": hangs}, time_limit_s=300)
    assert told == [0, 0, 2]
    assert caplog.records == []


def test_no_secret_is_in_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "5ecre7")

    def fails(_):
        raise RuntimeError("http://me:p%40ss@server:5000/api and https://me:b@d@server refuse the key 5ecre7")

    track(entry(tmp_path), {"wandb": fails})
    assert "http://***@server:5000/api and https://***@server refuse the key ***" in caplog.text
    assert without_secrets("an address: me@server, https://server/@me") == "an address: me@server, https://server/@me"


# The real ones.


def test_tensorboard_shows_all_processes_as_one_run(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    for iteration in (0, 1):
        log_to_tensorboard(entry(tmp_path, iteration, **{"reward": iteration / 4, "rewards/f/mean": 1.0}))
    log_to_tensorboard(replace(entry(tmp_path, 0), run_id="f" * 32))
    assert {path.name for path in (tmp_path / "tensorboard").iterdir()} == {"a-run-01234567", "a-run-ffffffff"}
    shown = EventAccumulator(str(tmp_path / "tensorboard" / "a-run-01234567"))
    shown.Reload()
    assert sorted(shown.Tags()["scalars"]) == ["reward", "rewards/f/mean"]
    found = [(event.step, event.wall_time, event.value) for event in shown.Scalars("reward")]
    assert found == [(0, 1000.5, 0.0), (1, 1001.5, 0.25)]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """W&B without a network and without an account; its service is ended afterwards."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    yield
    wandb.teardown()


def log_records(body):
    """The records of LevelDB's log format after 7 bytes of W&B's: blocks of chunks, each with its length and kind."""
    at, record = 7, b""
    while at + 7 <= len(body):
        if 32_768 - at % 32_768 < 7:  # too little of the block is left for a chunk
            at += 32_768 - at % 32_768
        length, kind = struct.unpack("<HB", body[at + 4 : at + 7])
        record += body[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last chunk
            yield record
            record = b""


def history(file):
    """(run id, project, name, {metric: JSON of its value}) of every step in a file that W&B would upload."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415

    run = None
    for body in log_records(file.read_bytes()):
        record = Record.FromString(body)
        run = record.run if record.HasField("run") else run
        if record.HasField("history"):
            values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            yield run.run_id, run.project, run.display_name, values


def test_wandb_gets_every_iteration_at_its_step_of_one_run(offline, tmp_path):
    for iteration in (0, 1):
        log_to_wandb(entry(tmp_path / "tracking", iteration))
    files = sorted(tmp_path.glob("tracking/wandb/offline-run-*/*.wandb"))
    steps = [step for file in files for step in history(file)]
    assert len(files) == 2
    assert {step[:3] for step in steps} == {(RUN_ID, "project", "a run")}
    values = sorted((float(step["_step"]), float(step["reward"])) for *_, step in steps)
    assert values == [(0.0, 0.25), (1.0, 0.25)]


def test_wandb_that_does_not_answer_is_asked_again_for_the_next_iteration(offline, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tracking, "WANDB_INIT_LIMIT_S", 1.0)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "5ecre7" * 7)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for iteration in (0, 1):
            track(entry(tmp_path, iteration), {"wandb": log_to_wandb})
    warnings = [record.getMessage() for record in caplog.records if record.name == tracking.__name__]
    assert [text.partition(":")[0] for text in warnings] == [f"wandb may lack iteration {n}" for n in (0, 1)]
    assert not any("in use" in text for text in warnings)
    assert "5ecre7" not in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_gets_every_iteration_at_its_step_of_one_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy, which MLflow's databases need, is not installed")
    from mlflow.tracking import MlflowClient  # noqa: PLC0415

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    for iteration in (0, 1, 1):  # the last one as an attempt that was cut off repeats it
        log_to_mlflow(entry(tmp_path, iteration))
    log_to_mlflow(replace(entry(tmp_path), run_id="f" * 32))
    client = MlflowClient()
    experiment = client.get_experiment_by_name("project")
    runs = {run.data.tags["gleaner.run_id"]: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {RUN_ID, "f" * 32}
    assert runs[RUN_ID].info.run_name == "a run"
    found = client.get_metric_history(runs[RUN_ID].info.run_id, "reward")
    assert [(m.step, m.timestamp, m.value) for m in found] == [(0, 1_000_500, 0.25), (1, 1_001_500, 0.25)]
    assert len(client.get_metric_history(runs[RUN_ID].info.run_id, "val/pass_at_1")) == 2  # MLflow takes no '@'


def test_mlflow_is_not_told_without_a_server(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track(entry(tmp_path), {"mlflow": TRACKERS["mlflow"]})
    assert "the environment variable MLFLOW_TRACKING_URI is not set" in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_server_that_is_gone_is_a_warning_without_its_password(tmp_path, caplog, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    track(entry(tmp_path), {"mlflow": log_to_mlflow})
    assert "mlflow may lack iteration 0: " in caplog.text
    assert f"127.0.0.1:{port}" in caplog.text
    assert "hunter2" not in caplog.text
