"""Python programs as processes that a starter forks: each is a real one, and none of them imports torch again."""

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from resources.local_starter import running_starter
from tasks.rollout import IMPORTS
from tests.processes import ROOT

# The process says its number, gives its standard streams to pipes, and then becomes the program.
_PROGRAM = """
import json, os, pathlib, runpy, sys
folder, streams, path, program = json.loads(sys.argv[1])
pathlib.Path(folder, "pid").write_text(str(os.getpid()))
for stream in streams:
    descriptor = os.open(f"{folder}/{stream}", os.O_WRONLY if stream else os.O_RDONLY)
    os.dup2(descriptor, stream)
    os.close(descriptor)
sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
sys.path[:], sys.argv[:] = path, program
if program[0].endswith(".py"):
    runpy.run_path(program[0], run_name="__main__")
else:
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)
"""
_REWARD_MODEL = ("tasks.grading.reward_model", "transformers.models.qwen2.modeling_qwen2")


class ForkedProcess:
    """A process with the part of subprocess.Popen's interface that is needed here."""

    def __init__(self, program: list[str], streams: tuple[int, ...], imports: tuple[str, ...] = ()) -> None:
        """Run a script or a module; `streams` are those of its standard streams that become pipes, 0 to 2."""
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "program.py"
            script.write_text(_PROGRAM)
            for stream in streams:
                os.mkfifo(Path(folder) / str(stream))
            starter = running_starter(os.environ | {"PYTHONPATH": str(ROOT)})
            request = json.dumps([folder, streams, [str(ROOT), *sys.path], program])
            self._process = starter.start([str(script), request], os.environ, (*IMPORTS, *imports))
            # Each waits until the process has opened the other end.
            self.streams: dict[int, Any] = {
                stream: (Path(folder) / str(stream)).open("rb" if stream else "wb", buffering=0) for stream in streams
            }
            self.pid = int((Path(folder) / "pid").read_text())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises subprocess.TimeoutExpired."""
        try:
            self.returncode = self._process.wait(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0) from None
        return self.returncode

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedScript(ForkedProcess):
    """A script, or a module, whose output and errors are text."""

    def __init__(self, program: Path | str, *arguments: str) -> None:
        super().__init__([str(program), *arguments], (1, 2))
        self.stdout, self.stderr = (io.TextIOWrapper(io.BufferedReader(self.streams[n])) for n in (1, 2))

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of its output and errors, when it has ended."""
        with ThreadPoolExecutor(1) as thread, self.stdout, self.stderr:
            errors = thread.submit(self.stderr.read)
            told = self.stdout.read()
            self.wait(timeout)
            return told, errors.result()


class ForkedWorker(ForkedProcess):
    """The worker process of a reward, in place of what resources.user_process starts."""

    def __init__(self, module: str, named: Collection[str] = ()) -> None:
        super().__init__([module], (0, 1), _REWARD_MODEL)
        self.stdin, self.stdout = self.streams[0], self.streams[1]
        for stream in self.streams.values():
            os.set_blocking(stream.fileno(), False)
