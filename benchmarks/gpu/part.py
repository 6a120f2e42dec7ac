"""A part of benchmarks.gpu in a process of its own, which frees the device's memory and cannot break other parts.

`run_part` starts the process, repeats each figure at the moment when it is there, and ends the process at its limit.
What it had measured until then counts.
"""

import argparse
import importlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from benchmarks.gpu.report import rows
from benchmarks.gpu.sizes import SHAPES, Size, size_for
from benchmarks.reporting import shown


@dataclass(frozen=True)
class Part:
    """place: "module:function", which returns its figures, or yields all that it has each time that it has another.

    minutes: the most that it may take. packages: what it requires; other missing imports are found when it begins.
    """

    place: str
    minutes: float
    packages: tuple[str, ...] = ("torch", "transformers")


_WITH_VLLM = ("torch", "transformers", "vllm")
# In the order of what is not known. The first five fit into ten minutes.
PARTS = {
    "engines": Part("benchmarks.gpu.engines:measure", 3.0),
    "trainer": Part("benchmarks.gpu.trainer:measure", 1.6),
    "handover": Part("benchmarks.gpu.handover:measure", 1.8, _WITH_VLLM),
    "start": Part("benchmarks.gpu.start:measure", 1.5, _WITH_VLLM),
    "iteration": Part("benchmarks.gpu.iteration:measure", 2.0),
    "identity": Part("benchmarks.gpu.identity:measure", 7),
    "speculation": Part("benchmarks.gpu.speculation:measure", 4.0),
    "head": Part("benchmarks.gpu.head:measure", 1.5, ("torch",)),
    "frontend": Part("benchmarks.gpu.frontend:measure", 3, _WITH_VLLM),
    "taxes": Part("benchmarks.gpu.engines:measure_taxes", 3, _WITH_VLLM),
    "noise": Part("benchmarks.gpu.noise:measure", 1, ("torch",)),
}
# A line of output that begins so is a figure.
MARK = "## "
_ROOT = Path(__file__).parents[2]
_LINES_SHOWN = 40
_LOOK_INTERVAL_S = 0.2
_KILLED_WITHIN_S = 10.0  # else the process hangs in the driver, and is left to it


@dataclass(frozen=True)
class Outcome:
    """How a part ended. figures: what it had measured until then; reason: one line on why there are no more."""

    status: Literal["measured", "skipped", "failed"]
    figures: dict[str, Any]
    reason: str = ""


def run_part(part: str, size: Size, model: str, limit_s: float) -> Outcome:
    """Measure a part in a child process, which is ended with all its children after `limit_s` seconds.

    Its figures are printed as they come. If the child fails, the last lines of its output are shown on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.gpu.part", part, json.dumps(asdict(PARTS[part])), str(result)]
        command += ["--device", size.device, "--model", model, "--caches", size.caches]
        command += ["--small"] if size.small else []
        # A CPU is shared with other work, and several engines would wait for each other.
        threads = {"OMP_NUM_THREADS": "1"} if size.device == "cpu" else {}
        failure = _run(command, {"PYTHONUNBUFFERED": "1", **threads}, log, limit_s)
        found = Outcome("failed", {})
        with suppress(FileNotFoundError):
            found = Outcome(**json.loads(result.read_text()))
        if failure is None and found.status != "failed":
            return found
        lines = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith(MARK)]
        print("\n".join(lines[-_LINES_SHOWN:]), file=sys.stderr)
        return Outcome("failed", found.figures, f"{failure or 'no figures'}: {_last_line(lines)}")


def _run(command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> str | None:
    """Run the command and repeat its figures; returns what went wrong, or None."""
    with log.open("w") as output, log.open(errors="replace") as reader:
        child = subprocess.Popen(
            command, cwd=_ROOT, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **environment}
        )
        try:
            status = _watched(child, _Figures(reader), limit_s)
        finally:
            # Engine processes outlive a part that breaks down, so the whole process group is killed.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_KILLED_WITHIN_S)
    if status is None:
        return f"not done after {limit_s:g} s"
    return None if status == 0 else f"exit status {status}"


def _watched(child: "subprocess.Popen[bytes]", figures: "_Figures", limit_s: float) -> int | None:
    """The exit status of a child whose figures are repeated; None if it still runs after `limit_s` seconds."""
    end_s = time.monotonic() + limit_s
    status = None
    while status is None and (left_s := end_s - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            status = child.wait(min(left_s, _LOOK_INTERVAL_S))
        figures.repeat()
    return status


class _Figures:
    """Repeats the lines of a growing file that are figures."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._begun = ""

    def repeat(self) -> None:
        """Print what has come since the last call, whole lines alone."""
        *lines, self._begun = (self._begun + self._file.read()).split("\n")
        for line in lines:
            if line.startswith(MARK):
                print(line, flush=True)


def _last_line(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def measure(part: Part, size: Size, keep: Callable[[Outcome], None] = lambda _: None) -> Outcome:
    """Measure in this process; skipped if the device or a package is missing.

    keep: gets what was measured so far, as the outcome that it would be if the process broke down now.
    """
    module, _, function = part.place.partition(":")
    for package in part.packages:
        if importlib.util.find_spec(package) is None:
            return Outcome("skipped", {}, f"{package} is not installed")
    if size.device == "cuda" and not _sees_gpu():
        return Outcome("skipped", {}, "PyTorch sees no GPU; --device cpu --small tries the code without one")
    try:
        code = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("benchmarks", "tasks", "storage", "resources"):
            raise
        return Outcome("skipped", {}, f"{error.name} is not installed")
    warnings = _Warnings()
    figures: dict[str, Any] = {}
    logging.getLogger("tasks").addHandler(warnings)
    try:
        for figures in _each(getattr(code, function)(size)):
            keep(Outcome("failed", figures))
    finally:
        logging.getLogger("tasks").removeHandler(warnings)
    return Outcome("measured", figures | {"warnings": warnings.messages, "device": _device(size.device)})


def _each(found: Any) -> Iterator[dict[str, Any]]:
    """The figures of a part that returns or yields them."""
    if isinstance(found, Mapping):
        yield dict(found)
    else:
        yield from found


class _Kept:
    """What a part has measured: in a file, and each new row of its table in a line of output."""

    def __init__(self, part: str, result: Path) -> None:
        self._part, self._result = part, result
        self._told: list[Any] = []

    def keep(self, outcome: Outcome) -> None:
        # A process that is killed while it writes leaves what it had written before.
        begun = self._result.with_suffix(".begun")
        begun.write_text(json.dumps(asdict(outcome)))
        begun.replace(self._result)
        for row in rows({self._part: outcome.figures}):
            if row not in self._told:
                self._told.append(row)
                measure, *more = [f"{name} {shown(value)}" for name, value in row.items()]
                print(f"{MARK}{self._part}: {', '.join([measure.removeprefix('measure '), *more])}", flush=True)


class _Warnings(logging.Handler):
    """Keeps the warnings of our code, such as one about a kernel that it does not use."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _sees_gpu() -> bool:
    import torch  # noqa: PLC0415 - not where it is only asked whether torch is there

    return torch.cuda.is_available()


def _device(device: str) -> dict[str, Any]:
    """The device of the measurement."""
    import torch  # noqa: PLC0415 - see above

    if device != "cuda":
        return {"name": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}


def main() -> None:
    """Measure one part and write its outcome as JSON to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("part", type=lambda text: Part(**json.loads(text)), help="as JSON")
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--caches", default="")
    given = parser.parse_args()
    kept = _Kept(given.name, given.result)
    size = size_for(given.device, given.model, small=given.small, caches=given.caches)
    kept.keep(measure(given.part, size, kept.keep))


if __name__ == "__main__":
    main()
