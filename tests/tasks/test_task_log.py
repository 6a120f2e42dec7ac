"""What Flyte's console shows of a pod that ended badly: the error file that the container's own command writes."""

import errno
import io
import json
import re

import pytest
from flyteidl.core import errors_pb2
from flytekit.exceptions.user import FlyteRecoverableException

from resources.granted import Granted, MachineTooSmall
from storage.stores.store import StoreDenied, StoreUnavailable
from tasks.configuration.references import PlanReference
from tasks.learning.rank_ends import RanksFailed
from tasks.learning.rank_process import FAILURE
from tasks.learning.rank_report import RankReport
from tasks.reporting.last_failures import TaskSubject
from tasks.sampling.engines.engine import EngineDied
from tasks.task_log import CAUSE_CHARACTERS_MAX, TaskFailed, TaskFailedForNow, error_line, logged_task, place_of
from tasks.train import train
from tests.processes import LIMIT_S, container
from tests.small_run import config, model_directory, plan_iteration

GIB = 1 << 30
GRANTED = Granted(cpus=2.0, memory_bytes=4 * GIB, gpus=0)
PLACE = "run s3://b/r, iteration 3, slot 2"
WORK = TaskSubject(task="train", run_url="memory://task-log", iteration=3)


def told(error, peak_bytes=3 * GIB, killed=0):
    line = error_line(PLACE, error, GRANTED, peak_bytes, killed)
    assert "\n" not in line
    return line


def test_the_place_is_run_iteration_and_slot():
    plan = PlanReference(run_url="s3://b/r", iteration=3, weight_version=3, execution="e")
    assert place_of(plan, 2) == PLACE
    assert place_of(plan) == "run s3://b/r, iteration 3"


CAUSES = pytest.mark.parametrize(
    ("error", "advice"),
    [
        (MemoryError(), "limit 4.00 GiB, peak 3.00 GiB, processes killed for it: 0. Raise memory of the pool"),
        (EngineDied("CUDA out of memory. Tried to"), "Raise memory of the pool"),
        (ModuleNotFoundError("No module named 'vllm'"), "The image lacks it"),
        (StoreDenied("s3://b/r: AccessDenied"), "get, put, delete and list"),
        (StoreUnavailable("no answer"), "endpoint and the network"),
        (OSError(errno.ENOSPC, "No space left on device"), "larger disk"),
        (MachineTooSmall("pools.train.memory: value 1Gi; this pod is limited to 1.00 GiB"), "Nothing was done yet"),
        (ValueError("the data is bad"), "give the command again; the run stays"),
    ],
)


@CAUSES
def test_a_line_says_where_why_and_what_to_do(error, advice):
    line = told(error)
    assert line.startswith(f"{PLACE}: {type(error).__name__}")
    assert advice in line


@CAUSES
def test_the_same_is_advised_where_a_rank_met_it(error, advice):
    told_by_rank = io.BytesIO()
    RankReport(io.BytesIO(), told_by_rank).fail(error, f"rank 1 of 2: {type(error).__name__}: {error}", lasting=True)
    failure = FAILURE.validate_python(json.loads(told_by_rank.getvalue())["failure"])
    line = told(RanksFailed(failure))
    assert line.startswith(f"{PLACE}: RanksFailed: rank 1 of 2: {type(error).__name__}")
    assert advice in line


def test_a_killed_engine_is_a_matter_of_memory_whatever_its_error_says():
    error = EngineDied("the process of the engine ended with -9")
    assert "Host memory" not in told(error)
    assert "peak 3.00 GiB, processes killed for it: 1" in told(error, killed=1)
    assert "peak unknown" in told(error, peak_bytes=None, killed=1)


def test_the_cause_is_that_of_what_flyte_retries_and_is_not_long():
    error = FlyteRecoverableException("again")
    error.__cause__ = StoreDenied("no\nright " + "x" * 1000)
    line = told(error)
    assert "StoreDenied: no right xxx" in line
    assert len(line) < len(PLACE) + CAUSE_CHARACTERS_MAX + 200


@pytest.mark.parametrize(
    ("raised", "kind"), [(ValueError, TaskFailed), (FlyteRecoverableException, TaskFailedForNow)], ids=str
)
def test_errors_are_replaced_in_a_pod_only(monkeypatch, raised, kind):
    with pytest.raises(raised, match="bad"), logged_task(PLACE, WORK):
        raise raised("bad")
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")
    with pytest.raises(kind) as caught, logged_task(PLACE, WORK):
        raise raised("bad")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(f"{PLACE}: {raised.__name__}: bad. ")
    assert "Traceback (most recent call last):" in rest
    assert any("raise raised" in line for line in rest)


@pytest.mark.slow
@pytest.mark.parametrize("refused", [False, True], ids=["a group that never comes", "a GPU that is not there"])
def test_the_error_of_flyte_begins_with_the_line(tmp_path, refused):
    url = str(tmp_path / "run")
    pools = {"train": {"gpus": 1}} if refused else {}
    settings = config(url, model_directory(tmp_path / "model"), trainer={"group_timeout_s": 0.05}, pools=pools)
    reference = plan_iteration(settings)
    with container(train, reference, tmp_path / "container", CUDA_VISIBLE_DEVICES="") as process:
        process.wait(LIMIT_S)
    document = errors_pb2.ErrorDocument()
    document.ParseFromString((tmp_path / "container" / "out" / "error.pb").read_bytes())
    lines = [line.strip() for line in document.error.message.splitlines() if line.strip()]
    assert lines[0] == "Trace:"
    cause = "WrongGpus: pools.train.gpus: value 1, and torch sees no GPU" if refused else "GroupTimeout: "
    assert re.match(rf"tasks\.task_log\.TaskFailed: run {re.escape(url)}, iteration 0: {re.escape(cause)}", lines[1])
    assert any(line.startswith("Traceback") for line in lines[2:]), json.dumps(lines)
    assert "AttributeError" not in document.error.message
    assert document.error.kind == errors_pb2.ContainerError.NON_RECOVERABLE
