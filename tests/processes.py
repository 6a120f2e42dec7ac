"""Real processes for tests: as PID 1 of a namespace of their own, the container's command of a task, their end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import LiteralMap

from resources.process import descendants
from storage.stores.connect import connect
from tasks.configuration.references import PlanReference

ROOT = Path(__file__).parents[1]
# Three processes that import torch on a busy machine take a minute.
LIMIT_S = 600
_UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _namespaces() -> list[str]:
    for command in (_UNSHARE, [*_UNSHARE, "--user", "--map-root-user"]):
        try:
            subprocess.run([*command, "true"], check=True, capture_output=True, timeout=LIMIT_S)
        except (OSError, subprocess.SubprocessError):
            continue
        return command
    return []


# What makes a command PID 1, as in a container; empty where this user may not.
PID_1 = _namespaces()


def first_process(launcher: int, *, as_pid_1: bool) -> int:
    """The process that a container would signal: `launcher`, or the one it has made PID 1."""
    return descendants(launcher)[0] if as_pid_1 else launcher


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def are_gone(processes: Sequence[int]) -> bool:
    """Whether all have ended, if perhaps nobody has asked for their status."""
    return not any(_is_alive(process) for process in processes)


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent(process: int) -> int:
    """The number of a process's parent; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def command(process: int) -> str:
    """The command line of a process; empty when it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def container(
    task: Any, plan: PlanReference, folder: Path, slot: int | None = None, **environment: str
) -> "AbstractContextManager[subprocess.Popen[bytes]]":
    """A task with a plan, and a slot if given, by the very command of its container, as PID 1 where that can be.

    It is killed at the end. Its output is in `folder`/log.
    """
    inputs = {"plan": plan} if slot is None else {"plan": plan, "slot": slot}
    return container_of(task, inputs, folder, str(folder), **environment)


@contextmanager
def container_of(
    task: Any, inputs: Mapping[str, Any], folder: Path, files: str, **environment: str
) -> "Iterator[subprocess.Popen[bytes]]":
    """The same of a task with any inputs; files: a directory or a url where Flyte's files of it are."""
    context = FlyteContextManager.current_context()
    kinds = task.python_interface.inputs
    literals = {
        name: TypeEngine.to_literal(context, value, kinds[name], TypeEngine.to_literal_type(kinds[name]))
        for name, value in inputs.items()
    }
    folder.mkdir(parents=True)
    connect(files).put("inputs.pb", LiteralMap(literals).to_flyte_idl().SerializeToString())
    values = {
        "{{.input}}": f"{files}/inputs.pb",
        "{{.outputPrefix}}": f"{files}/out",
        "{{.rawOutputDataPrefix}}": f"{files}/raw",
        "{{.checkpointOutputPrefix}}": f"{files}/raw/checkpoints",
        "{{.prevCheckpointPrefix}}": '""',
    }
    settings = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")
    command = [values.get(part, part) for part in task.get_command(settings)]
    command[0] = str(Path(sys.executable).parent / command[0])
    flyte = {
        "PYTHONPATH": str(ROOT),
        "FLYTE_INTERNAL_EXECUTION_ID": folder.name,
        # A dynamic task serialises what it wires.
        "_F_SS_C": settings.serialized_context,
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*PID_1, *command],
            cwd=ROOT,
            env={**os.environ, **flyte, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        for each in (process.pid, *descendants(process.pid)) if process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait(LIMIT_S)
