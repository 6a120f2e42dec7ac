"""Python programs as processes that a starter forks: each is a real one, and none of them imports torch again."""

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks.local_starter import running_starter
from tasks.rollout import IMPORTS
from tests.processes import ROOT

# The process gives its standard output and error to two pipes, and then becomes the program.
_PROGRAM = """
import os, runpy, sys
for stream, pipe in zip((1, 2), sys.argv[1:3]):
    descriptor = os.open(pipe, os.O_WRONLY)
    os.dup2(descriptor, stream)
    os.close(descriptor)
sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1, errors="backslashreplace")
sys.argv[:] = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Forked:
    """A process with the part of subprocess.Popen's interface that tests need; text goes through pipes."""

    def __init__(self, script: Path, *arguments: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program, *pipes = (Path(folder) / name for name in ("program.py", "output", "errors"))
            program.write_text(_PROGRAM)
            for pipe in pipes:
                os.mkfifo(pipe)
            starter = running_starter(os.environ | {"PYTHONPATH": str(ROOT)})
            command = [program, *pipes, script, *arguments]
            self._process = starter.start([str(part) for part in command], os.environ, IMPORTS)
            # Each waits until the process has opened the other end.
            self.stdout, self.stderr = (pipe.open(encoding="utf-8") for pipe in pipes)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        try:
            return self.wait(0)
        except TimeoutError:
            return None

    def wait(self, limit_s: float | None = None) -> int:
        """The exit code, as that of subprocess; raises TimeoutError."""
        self.returncode = self._process.wait(limit_s)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of its output and errors, when it has ended."""
        with ThreadPoolExecutor(1) as thread, self.stdout, self.stderr:
            errors = thread.submit(self.stderr.read)
            told = self.stdout.read()
            self.wait(timeout)
            return told, errors.result()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
