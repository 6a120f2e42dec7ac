"""Containers' commands as Flyte would run them, on a store that records the time of every request.

Inputs, outputs and the run are on an S3 server in this process. Its requests tell how far a container is, so that
nothing has to be put into the container to watch it.
"""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import LiteralMap

from storage.stores.connect import connect
from tasks.conclude import conclude
from tasks.configuration.references import PlanReference, TrainOutcome
from tasks.local_map import crew_map
from tasks.plan import plan
from tasks.rollout import rollout
from tasks.train import train
from workflows.training import iterations

BUCKET, KEY = "gleaner-start", "start"
EXECUTION = "start-benchmark"
SETTINGS = SerializationSettings(ImageConfig.auto(img_name="local/none:0"), "local", "local", "local")
TIME_LIMIT_S = 300
# It starts the command from a small process, because a child's peak memory includes that of the forking process.
LAUNCH = """
import json, os, sys, time
began_s = time.time()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
_, status, usage = os.wait4(pid, 0)
cpu_s, peak_mb = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
print(json.dumps([began_s, time.time(), cpu_s, peak_mb, os.waitstatus_to_exitcode(status)]))
"""


@dataclass(frozen=True)
class Request:
    """The time when a request reached the server (Unix seconds), and "METHOD /bucket/key?query"."""

    at_s: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Life:
    """A process from its start to its end: seconds, peak MB of its largest process, and its requests."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    began_s: float
    requests: list[Request]

    def until(self, pattern: str) -> float | None:
        """Seconds from the start to the first request that matches; None if there was none."""
        return next((each.at_s - self.began_s for each in self.requests if re.match(pattern, each.what)), None)


@dataclass
class Bucket:
    """The server's address, and all requests so far."""

    endpoint: str
    requests: list[Request] = field(default_factory=list)


@contextmanager
def noting_server() -> Iterator[Bucket]:
    """A bucket on moto's server in this process; the environment variables of the process point to it."""
    s3_server: Any = importlib.import_module("tests.s3_server")
    requests: list[Request] = []

    class Noting(s3_server.SerialisedMoto):  # type: ignore[misc]  # known at run time only
        def __call__(self, environment: dict[str, Any], start_response: Any) -> list[bytes]:
            asked = f"{environment['REQUEST_METHOD']} {environment['PATH_INFO']}?{environment['QUERY_STRING']}"
            requests.append(Request(time.time(), asked))
            body: list[bytes] = super().__call__(environment, start_response)
            return body

    with s3_server.moto_server(Noting) as (endpoint, _):
        os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY}
        os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()  # noqa: S310 - ours
        yield Bucket(endpoint, requests)


@dataclass(frozen=True, kw_only=True)
class Container:
    """A task with its inputs, and the index if it is an element of a map."""

    task: Any
    inputs: Mapping[str, Any]
    index: int | None = None


def iterations_of(config: dict[str, Any]) -> Container:
    """The dynamic task that unrolls one iteration."""
    return Container(task=iterations, inputs={"config": config, "count": 1})


def plan_of(config: dict[str, Any]) -> Container:
    """The plan of the run's next iteration."""
    return Container(task=plan, inputs={"config": config, "after": -1, "ahead": 0, "pools": ["rollout"]})


def rollout_of(reference: PlanReference) -> Container:
    """The only slot of a plan."""
    mapped = crew_map(functools.partial(rollout, plan=reference))
    return Container(task=mapped, inputs={"slot": [0], "plan": reference}, index=0)


def train_of(reference: PlanReference) -> Container:
    """The trainer of a plan."""
    return Container(task=train, inputs={"plan": reference})


def conclude_of(reference: PlanReference) -> Container:
    """The conclusion of a plan that was trained."""
    trained = TrainOutcome(plan=reference, weight_version=1, reward=0.0)
    return Container(task=conclude, inputs={"trained": trained, "last": False})


def run_container(bucket: Bucket, container: Container, folder: str, tree: Path) -> Life:
    """Run the container's command in the checkout `tree`; Flyte's files for it are in `folder` of the bucket.

    Raises RuntimeError when the task fails.
    """
    context = FlyteContextManager.current_context()
    kinds = container.task.python_interface.inputs
    literals = {
        name: TypeEngine.to_literal(context, value, kinds[name], TypeEngine.to_literal_type(kinds[name]))
        for name, value in container.inputs.items()
    }
    body = LiteralMap(literals).to_flyte_idl().SerializeToString()
    connect(f"s3://{BUCKET}/{folder}").put("inputs.pb", body)
    base = f"s3://{BUCKET}/{folder}"
    values = {
        "{{.input}}": f"{base}/inputs.pb",
        "{{.outputPrefix}}": f"{base}/out",
        "{{.rawOutputDataPrefix}}": f"{base}/raw",
        "{{.checkpointOutputPrefix}}": f"{base}/raw/_flytecheckpoints",
        "{{.prevCheckpointPrefix}}": '""',
    }
    command = [values.get(part, part) for part in container.task.get_command(SETTINGS)]
    command[0] = str(Path(sys.executable).parent / command[0])
    life = run_process(bucket, command, tree, _environment(container))
    failed = next(
        (each.what for each in life.requests if each.what.startswith(f"PUT /{BUCKET}/{folder}/out/error.pb")), None
    )
    if failed is not None:
        raise RuntimeError(f"{container.task.name} failed; see {failed}")
    return life


def run_process(bucket: Bucket, command: list[str], tree: Path, environment: Mapping[str, str]) -> Life:
    """Run a command in the checkout `tree`; raises RuntimeError when it fails."""
    before = len(bucket.requests)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCH, *command],
        env={**os.environ, **environment, "PYTHONPATH": str(tree)},
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=True,
    )
    began_s, ended_s, cpu_s, peak_mb, code = json.loads(done.stdout)
    if code:
        raise RuntimeError(f"{' '.join(command[:3])} ended with {code}:\n{done.stderr}")
    return Life(
        wall_s=ended_s - began_s, cpu_s=cpu_s, peak_mb=peak_mb, began_s=began_s, requests=bucket.requests[before:]
    )


def _environment(container: Container) -> dict[str, str]:
    """The environment variables that Flyte sets, and the store's address for flytekit's own files."""
    index = {} if container.index is None else {"FLYTE_K8S_ARRAY_INDEX": str(container.index)}
    return {
        "OMP_NUM_THREADS": "1",
        "FLYTE_INTERNAL_EXECUTION_ID": EXECUTION,
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "local",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "local",
        "FLYTE_ATTEMPT_NUMBER": "0",
        "FLYTE_AWS_ENDPOINT": os.environ["AWS_ENDPOINT_URL"],
        "FLYTE_AWS_ACCESS_KEY_ID": KEY,
        "FLYTE_AWS_SECRET_ACCESS_KEY": KEY,
        "BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX",
        "_F_SS_C": SETTINGS.serialized_context,
        **index,
    }
