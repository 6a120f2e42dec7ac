"""A part of benchmarks.gpu in a process of its own, which frees the device's memory and cannot break other parts.

`run_part` starts the process, waits, and reads its figures or the reason why there are none.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.sizes import SHAPES, Size, size_for


@dataclass(frozen=True)
class Part:
    """place: "module:function", which measures. minutes: the most that it may take on a GPU, and at --small.

    packages: what it requires; other missing imports are found when it begins. shape: a key of SHAPES that replaces the
    one that was chosen.
    """

    place: str
    minutes: float
    packages: tuple[str, ...] = ("torch", "transformers")
    shape: str | None = None


_WITH_VLLM = ("torch", "transformers", "vllm")
# In the order of their worth.
PARTS = {
    "identity": Part("benchmarks.gpu.identity:measure", 7),
    "plain_1.7b": Part("benchmarks.gpu.engines:measure_plain", 3, _WITH_VLLM, "1.7b"),
    "invariant_1.7b": Part("benchmarks.gpu.engines:measure_invariant", 3, _WITH_VLLM, "1.7b"),
    "plain_7b": Part("benchmarks.gpu.engines:measure_plain", 4, _WITH_VLLM, "7b"),
    "invariant_7b": Part("benchmarks.gpu.engines:measure_invariant", 4, _WITH_VLLM, "7b"),
    "start": Part("benchmarks.gpu.start:measure", 4, _WITH_VLLM),
    "head": Part("benchmarks.gpu.head:measure", 1.5, ("torch",)),
    "trainer": Part("benchmarks.gpu.trainer:measure", 4),
    "handover": Part("benchmarks.gpu.handover:measure", 2, ("torch",)),
    "frontend": Part("benchmarks.gpu.frontend:measure", 3, _WITH_VLLM),
    "engines": Part("benchmarks.gpu.engines:measure", 5, _WITH_VLLM),
    "iteration": Part("benchmarks.gpu.iteration:measure", 3.5),
    "noise": Part("benchmarks.gpu.noise:measure", 1, ("torch",)),
}
_ROOT = Path(__file__).parents[2]
_LINES_SHOWN = 40


@dataclass(frozen=True)
class Outcome:
    """How a part ended. `figures`: its measurements; `reason`: one line on why there are none."""

    status: Literal["measured", "skipped", "failed"]
    figures: dict[str, Any]
    reason: str = ""


def run_part(part: str, size: Size, model: str, limit_s: float) -> Outcome:
    """Measure a part in a child process, which is ended with all its children after `limit_s` seconds.

    If the child fails, the last lines of its output are shown on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.gpu.part", part, str(result), "--device", size.device]
        command += ["--model", PARTS[part].shape or model, *(["--small"] if size.small else [])]
        with log.open("w") as output:
            # A CPU is shared with other work, and several engines would wait for each other.
            threads = {"OMP_NUM_THREADS": "1"} if size.device == "cpu" else {}
            failure = _run(command, {"PYTHONUNBUFFERED": "1", **threads}, output.fileno(), limit_s)
        if failure is None:
            return Outcome(**json.loads(result.read_text()))
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-_LINES_SHOWN:]), file=sys.stderr)
        return Outcome("failed", {}, f"{failure}: {_last_line(lines)}")


def _run(command: Sequence[str], environment: Mapping[str, str], output: int, limit_s: float) -> str | None:
    """Run the command; returns what went wrong, or None."""
    child = subprocess.Popen(
        command, cwd=_ROOT, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **environment}
    )
    try:
        status = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:g} s"
    finally:
        # Engine processes outlive a part that breaks down, so the whole process group is killed.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return None if status == 0 else f"exit status {status}"


def _last_line(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def measure(part: str, size: Size) -> Outcome:
    """Measure in this process; skipped if the device or a package is missing."""
    module, _, function = PARTS[part].place.partition(":")
    if size.device == "cpu" and part.startswith("invariant"):
        return Outcome("skipped", {}, "vLLM has batch-invariant kernels for GPUs only")
    for package in PARTS[part].packages:
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
    logging.getLogger("tasks").addHandler(warnings)
    try:
        figures = getattr(code, function)(size)
    finally:
        logging.getLogger("tasks").removeHandler(warnings)
    return Outcome("measured", figures | {"warnings": warnings.messages, "device": _device(size.device)})


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
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    outcome = measure(given.part, size_for(given.device, given.model, small=given.small))
    given.result.write_text(json.dumps(vars(outcome)))


if __name__ == "__main__":
    main()
