"""Sends an iteration's metrics to TensorBoard, Weights & Biases and MLflow; no tracker delays the run.

Each tracker is a function that logs one iteration, also after other processes logged the earlier iterations.
Credentials come from the environment, as the libraries expect, and are removed from all messages here.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from storage.records.evaluation_records import EvaluationRecord
from storage.records.records import ReportRecord
from tasks.configuration.tracking import TrackingConfig

log = logging.getLogger(__name__)
# For all trackers of an iteration together.
TIME_LIMIT_S = 30.0
# Limits of W&B's own steps, so that it gives up before that, and does not keep the process from ending.
WANDB_LOGIN_LIMIT_S, WANDB_INIT_LIMIT_S, WANDB_FINISH_LIMIT_S = 3.0, 14.0, 10.0
MLFLOW_RUN_TAG = "gleaner.run_id"
SECRET_VARIABLES = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
USER_INFO = re.compile(r"(?<=://)[^/\s]*@")


@dataclass(frozen=True, kw_only=True)
class TrackedIteration:
    """One committed iteration, as trackers get it.

    Attributes:
        run_id: Letters and digits, unique to the run, and equal in every process that advances the run.
        project: The project of the run.
        name: The run's name.
        directory: The folder of event files.
        iteration: The iteration.
        committed_at_s: Seconds since 1970.
        metrics: The metrics of the report.
    """

    run_id: str
    project: str
    name: str
    directory: Path
    iteration: int
    committed_at_s: float
    metrics: Mapping[str, float]


Tracker = Callable[[TrackedIteration], None]
# The folder of TensorBoard's event files and of W&B's own files, below the folder of the process.
DIRECTORY = "tracking"


def tracked_iteration(report: ReportRecord, config: TrackingConfig, *, run_id: str, run_url: str) -> TrackedIteration:
    """The entry of a report for the trackers."""
    return TrackedIteration(
        run_id=run_id,
        project=config.project,
        name=_run_name(config, run_url),
        directory=Path(DIRECTORY),
        iteration=report.iteration,
        committed_at_s=report.created_at_s,
        metrics=report.metrics,
    )


def tracked_evaluation(
    record: EvaluationRecord, config: TrackingConfig, *, run_id: str, run_url: str
) -> TrackedIteration:
    """The entry of an evaluation for the trackers: each set of settings is its own run, with weight versions as steps.

    It is separate because W&B accepts only ascending steps, and an evaluation may end later than the iterations after
    it.
    """
    return TrackedIteration(
        run_id=f"{run_id}{record.digest}",
        project=config.project,
        name=f"{_run_name(config, run_url)}-val-{record.digest}",
        directory=Path(DIRECTORY),
        iteration=record.weight_version,
        committed_at_s=record.created_at_s,
        metrics=record.metrics,
    )


def _run_name(config: TrackingConfig, run_url: str) -> str:
    return config.name or run_url.rstrip("/").rpartition("/")[2] or "run"


def track(entry: TrackedIteration, trackers: Mapping[str, Tracker], time_limit_s: float = TIME_LIMIT_S) -> None:
    """Let every tracker log the iteration, side by side; a tracker that fails or exceeds the limit becomes a warning.

    A tracker that still hangs from an earlier iteration is left out. No error of a tracker is raised here.
    """
    busy = {thread.name for thread in threading.enumerate()}
    end_s = time.monotonic() + time_limit_s
    attempts: dict[str, threading.Thread] = {}
    for backend, tracker in trackers.items():
        name = f"tracking-{backend}"
        if name in busy:
            _warn(backend, entry, "it still hangs from an earlier one")
            continue
        # A daemon, so that the process may end although the tracker does not.
        attempts[backend] = threading.Thread(target=_attempt, args=(backend, tracker, entry), name=name, daemon=True)
        attempts[backend].start()
    for backend, thread in attempts.items():
        thread.join(max(0.0, end_s - time.monotonic()))
        if thread.is_alive():
            _warn(backend, entry, f"no answer within {time_limit_s:g} s")


def _attempt(backend: str, tracker: Tracker, entry: TrackedIteration) -> None:
    try:
        tracker(entry)
    except BaseException as error:  # noqa: BLE001 - in its own thread no other code could handle it
        _warn(backend, entry, f"{type(error).__name__}: {error}")


def _warn(backend: str, entry: TrackedIteration, reason: str) -> None:
    log.warning("%s may lack iteration %d: %s", backend, entry.iteration, without_secrets(reason))


def without_secrets(text: str) -> str:
    """The text on one line, without the values of SECRET_VARIABLES and without a url's user and password."""
    for variable in SECRET_VARIABLES:
        if secret := os.environ.get(variable):
            text = text.replace(secret, "***")
    return " ".join(USER_INFO.sub("***@", text).split())


def log_to_tensorboard(entry: TrackedIteration) -> None:
    """Log to one event file per iteration; TensorBoard shows the common folder as one run."""
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - only where it was asked for
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

    # A run that is begun anew under the same name gets its own folder.
    name = re.sub(r"[^\w.-]", "-", entry.name)
    writer = EventFileWriter(str(entry.directory / "tensorboard" / f"{name}-{entry.run_id[:8]}"))
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in entry.metrics.items()]
    try:
        writer.add_event(Event(wall_time=entry.committed_at_s, step=entry.iteration, summary=Summary(value=values)))
    finally:
        writer.close()


def log_to_wandb(entry: TrackedIteration) -> None:
    """Log one step of the W&B run with the run's id; begin and end the W&B run, to leave nothing to upload."""
    # W&B's reports about itself would keep the process from ending while W&B does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb  # noqa: PLC0415 - only where it was asked for

    entry.directory.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        login_timeout=WANDB_LOGIN_LIMIT_S,
        init_timeout=WANDB_INIT_LIMIT_S,
        finish_timeout=WANDB_FINISH_LIMIT_S,
        finish_timeout_raises=True,
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
    )
    try:
        with wandb.init(
            project=entry.project,
            name=entry.name,
            id=entry.run_id,
            resume="allow",
            dir=str(entry.directory),
            settings=settings,
        ) as run:
            run.log(dict(entry.metrics), step=entry.iteration)
    except BaseException:
        # Otherwise W&B's service holds the id, and refuses it as in use for as long as this process lives.
        wandb.teardown()
        raise


def log_to_mlflow(entry: TrackedIteration) -> None:
    """Log one step of the MLflow run tagged with the run's id, at the server that MLFLOW_TRACKING_URI names.

    Logging an iteration again changes nothing if MLflow keeps metrics in a database: value, step and time are equal.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        raise LookupError("the environment variable MLFLOW_TRACKING_URI is not set")
    from mlflow.entities import Metric  # noqa: PLC0415 - only where it was asked for
    from mlflow.tracking import MlflowClient  # noqa: PLC0415

    client = MlflowClient()
    experiment = client.get_experiment_by_name(entry.project)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(entry.project)
    found = client.search_runs([experiment_id], f"tags.`{MLFLOW_RUN_TAG}` = '{entry.run_id}'", max_results=1)
    run = (
        found[0]
        if found
        else client.create_run(experiment_id, run_name=entry.name, tags={MLFLOW_RUN_TAG: entry.run_id})
    )
    at_ms = round(entry.committed_at_s * 1000)
    client.log_batch(
        run.info.run_id,
        # MLflow allows no '@'; verl replaces it in its names in the same way.
        [Metric(name.replace("@", "_at_"), value, at_ms, entry.iteration) for name, value in entry.metrics.items()],
    )


TRACKERS: Mapping[str, Tracker] = {
    "tensorboard": log_to_tensorboard,
    "wandb": log_to_wandb,
    "mlflow": log_to_mlflow,
}
