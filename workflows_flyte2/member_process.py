"""A process for each member on one machine: a kill there takes one member, as the loss of a pod does.

The script is the process. In pods the module only carries tasks.
"""

import functools
import importlib
import json
import os
import signal
import sys
import tempfile
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flyte.errors
from flytekit.exceptions.user import FlyteRecoverableException
from pydantic import TypeAdapter

from resources.granted import EXECUTION_VARIABLE
from resources.local_starter import StartedProcess, running_starter
from storage.errors import GleanerError
from tasks.local_map import ROOT, STOP_TIME_LIMIT_S
from workflows_flyte2.carried import LOCAL, Modes, called, carried, in_a_thread, is_local

GIVEN, RESULT, FAILURE = "given.json", "result.json", "failure.json"


class MemberEnded(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """The process of a member ended without a word: it was killed, or left on notice. Another attempt may help."""


def carried_apart(task: Any, module: str, imports: Sequence[str] = ()) -> Callable[..., Any]:
    """As `carried`, but on one machine the body has a process of its own. imports: modules that it needs soon."""
    function, inside = task.task_function, carried(task, module)

    @functools.wraps(function)
    async def body(**inputs: Any) -> Any:
        return await (_in_a_process(function, inputs, imports) if is_local() else inside(**inputs))

    body.__module__ = module
    return body


def start_ahead(imports: Sequence[str]) -> None:
    """Import ahead, during earlier tasks, the modules of later processes."""
    running_starter(_environment()).import_ahead((__name__, *imports))


async def _in_a_process(function: Callable[..., Any], inputs: Mapping[str, Any], imports: Sequence[str]) -> Any:
    """Call a body in a process; raises MemberEnded, or the error with which the body failed, as `called` does."""
    with tempfile.TemporaryDirectory(prefix="gleaner-member-") as name:
        folder, of_types = Path(name), _types(function)
        given = {each: of_types[each].dump_python(value, mode="json") for each, value in inputs.items()}
        (folder / GIVEN).write_text(json.dumps(given))
        command = [__file__, f"{function.__module__}:{function.__name__}", name]
        child = running_starter(_environment()).start(
            command, _environment(), (__name__, function.__module__, *imports)
        )
        try:
            code = await in_a_thread(child.wait)
        except BaseException:
            # The run is being ended: let the member write what it has.
            child.end()
            await in_a_thread(_end, child)
            raise
        if (folder / RESULT).exists():
            return of_types["return"].validate_json((folder / RESULT).read_bytes())
        if not (folder / FAILURE).exists():
            raise MemberEnded(f"{function.__name__}: its process ended with exit code {code}")
        failure = json.loads((folder / FAILURE).read_text())
        if failure["recoverable"]:
            raise FlyteRecoverableException(failure["message"])
        raise flyte.errors.NonRecoverableError(failure["message"], failure["kind"])


def _end(child: StartedProcess) -> None:
    try:
        child.wait(STOP_TIME_LIMIT_S)
    except TimeoutError:
        child.kill()


def _environment() -> dict[str, str]:
    """Variables of processes; all of a machine share its cores."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1", **os.environ, EXECUTION_VARIABLE: LOCAL, "PYTHONPATH": path}


def _types(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """What reads and writes each input as JSON, and under "return" the output."""
    return {name: TypeAdapter(hint) for name, hint in typing.get_type_hints(function).items()}


def main(target: str, folder: Path) -> None:
    """Call the body `module:function` with the inputs of a folder, and leave there what becomes of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name).task_function
    of_types, given = _types(function), json.loads((folder / GIVEN).read_text())
    inputs = {each: of_types[each].validate_python(value) for each, value in given.items()}
    try:
        result = called(function, inputs, LOCAL, Modes.TASK_EXECUTION)
    except (FlyteRecoverableException, flyte.errors.NonRecoverableError) as error:
        recoverable = isinstance(error, FlyteRecoverableException)
        said = {"message": str(error), "recoverable": recoverable, "kind": getattr(error, "code", "")}
        _leave(folder / FAILURE, json.dumps(said).encode())
    else:
        _leave(folder / RESULT, of_types["return"].dump_json(result))


def _leave(path: Path, content: bytes) -> None:
    """Write a file at once, for a kill to leave no half of the file."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
