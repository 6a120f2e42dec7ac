"""Starts the elements of local maps: forks each element from a process that has done the imports.

To import torch and transformers takes longer than a small rollout, so one process imports both once. That process, the
*starter*, has one thread, has computed nothing and has no store open, so a fork of it is as good as a new Python. The
starter ends when its user, the calling process, ends in any way. An element has a session of its own, gets SIGTERM if
the starter dies, and runs the container's command: the same script, with the arguments, the environment and the folder
that the caller gives. Some variables are read when a library is imported, before an element's environment is known; of
these, only the number of threads is set again.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from resources.process import end_with, is_stopped

# The folder in which it begins says nothing about what it may import, as with any script.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); from resources.local_starter import main; main(int(sys.argv[1]))"
)
# Without the first two, OpenBLAS and Arrow's jemalloc start threads as soon as they are imported. With the third, a
# library that looks for a GPU while it is imported does not initialise CUDA, which no fork could use then.
_WHILE_IMPORTING = {
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_running: "list[Starter]" = []
_choosing = threading.Lock()


class StartedProcess:
    """A process that a starter has forked."""

    def __init__(self, starter: "Starter", number: int, ended: "Future[int]") -> None:
        self._starter = starter
        self._number = number
        self._ended = ended

    def wait(self, limit_s: float | None = None) -> int:
        """The exit code, or minus the signal that ended it; raises TimeoutError.

        If the starter died first, the result is -SIGKILL, as after the loss of a machine: the process gets SIGTERM, and
        its exit code is unknown.
        """
        return self._ended.result(limit_s)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        self._starter.tell({"number": self._number, "signal": number})

    @property
    def stopped(self) -> int | None:
        """The number of the process that a signal has stopped: this process or the starter, else None.

        A stopped starter counts, because only the starter sees the end of its children.
        """
        known = (self._starter.pid, self._starter.process(self._number))
        return next((each for each in known if each is not None and is_stopped(each)), None)

    def end(self) -> None:
        """Send SIGTERM; a stopped process is continued to receive the signal."""
        self._starter.go_on()
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once. A starter that is stopped is killed, too: what it has started then counts as lost."""
        self.send_signal(signal.SIGKILL)
        if is_stopped(self._starter.pid):
            self._starter.kill()


class Starter:
    """This process's connection to a starter; any thread may use it. What is forked prints where this process prints.

    environment: the variables that hold while the starter imports.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._ends: dict[int, Future[int]] = {}
        self._processes: dict[int, int] = {}
        self._count = 0
        self._alive = True
        self._lock = threading.Lock()
        # Of its own, because a starter that imports reads nothing for seconds.
        self._sending = threading.Lock()
        self._connection, theirs = socket.socketpair()
        # In its own session it gets no interrupt from the terminal: the elements end as this process decides.
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**environment, **_WHILE_IMPORTING},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="starter", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The starter's own process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False as soon as it is known that the starter has ended."""
        return self._alive

    def process(self, number: int) -> int | None:
        """The process of request `number`; None until the fork, and after the end."""
        with self._lock:
            return self._processes.get(number)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], imports: Sequence[str] = ()
    ) -> StartedProcess:
        """Fork a process that runs a Python script (its path is the first part) in this process's folder.

        imports: modules that the starter imports ahead of the fork, unless imported already.
        """
        ended = Future[int]()
        with self._lock:
            self._count += 1
            number = self._count
            if self._alive:
                self._ends[number] = ended
            else:
                ended.set_result(-signal.SIGKILL)
        self.tell(
            {
                "number": number,
                "command": list(command),
                "environment": dict(environment),
                "folder": str(Path.cwd()),
                "imports": list(imports),
            }
        )
        return StartedProcess(self, number, ended)

    def import_ahead(self, names: Sequence[str]) -> None:
        """Have the starter import modules now, for what it is to start later."""
        self.tell({"imports": list(names)})

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send one request; a starter that has ended ignores it."""
        with self._sending, suppress(OSError):
            self._connection.sendall(json.dumps(request).encode() + b"\n")

    def go_on(self) -> None:
        """Let the starter go on, if a signal has stopped it."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the starter at once, by which its processes get SIGTERM; does not wait."""
        self._process.kill()

    def close(self) -> None:
        """End the starter, and wait for its end; its processes get SIGTERM."""
        self._process.terminate()
        self.go_on()
        self._reader.join()

    def _read(self) -> None:
        # A line that was cut off is the last one.
        with suppress(OSError, ValueError), self._connection.makefile("rb") as reports:
            for line in reports:
                report = json.loads(line)
                number = report["number"]
                with self._lock:
                    if "process" in report:
                        self._processes[number] = report["process"]
                        continue
                    self._processes.pop(number, None)
                    ended = self._ends.pop(number)
                ended.set_result(report["code"])
        self._process.wait()
        with self._lock:
            self._alive = False
            unknown = list(self._ends.values())
            self._ends.clear()
            self._processes.clear()
        with self._sending:
            self._connection.close()
        for ended in unknown:
            ended.set_result(-signal.SIGKILL)


def running_starter(environment: Mapping[str, str]) -> Starter:
    """The starter of this process: the running starter, or a new starter that imports with these variables."""
    with _choosing:
        if not _running or not _running[-1].alive:
            _running[:] = [Starter(environment)]
            atexit.register(_running[-1].close)
        return _running[-1]


def main(connection: int) -> None:
    """Be a starter for the process at the other end of the socket `connection`, and each of its elements."""
    starter = os.getpid()
    request = _serve(socket.socket(fileno=connection))
    if request is not None:
        _become(request, starter)


def _import_once(names: Sequence[str], tried: set[str]) -> None:
    missing = [name for name in names if name not in tried]
    tried.update(missing)
    for name in missing:
        # An element that needs what cannot be imported says so itself.
        with suppress(Exception):
            importlib.import_module(name)
    if missing:
        # Pages of objects that no collection visits stay shared with the elements.
        gc.collect()
        gc.freeze()


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork the requested elements, and report number and end of each process.

    Returns, in a forked process, its request; in the starter None, when its user has ended.
    """
    numbers: dict[int, int] = {}
    tried: set[str] = set()

    def report(number: int, **what: int) -> None:
        with suppress(OSError):
            connection.sendall(json.dumps({"number": number, **what}).encode() + b"\n")

    def report_ended(*_: object) -> None:
        # One by one, because an import may have children of its own.
        for process in list(numbers):
            if (code := _code(process)) is not None:
                report(numbers.pop(process), code=code)

    signal.signal(signal.SIGCHLD, report_ended)
    with suppress(ConnectionError), connection.makefile("rb") as requests:
        for line in requests:
            request: dict[str, Any] = json.loads(line)
            _import_once(request.get("imports", ()), tried)
            # A process is known before its end is looked at, and no process is signalled that has been waited for.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            if "command" not in request:
                for running in (running for running, number in numbers.items() if number == request.get("number")):
                    os.kill(running, request["signal"])
            elif (process := _forked()) is None:
                report(request["number"], code=os.EX_OSERR)
            elif process:
                numbers[process] = request["number"]
                report(request["number"], process=process)
            else:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                connection.close()
                return request
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    _end_all(numbers)
    return None


def _end_all(processes: Iterable[int]) -> None:
    """Have them get SIGTERM, of which the kernel takes care when the starter ends, but not where one is stopped."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for process in processes:
        os.kill(process, signal.SIGTERM)
        os.kill(process, signal.SIGCONT)


def _code(process: int) -> int | None:
    """The exit code of a child that has ended; None for a running child, and for a child waited for already."""
    try:
        ended, status = os.waitpid(process, os.WNOHANG)
    except ChildProcessError:
        # The end of another child came in the middle of this look, and was looked at meanwhile.
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


def _forked() -> int | None:
    """What os.fork returns; None if the machine has no room for another process."""
    try:
        return os.fork()
    except OSError:
        return None


def _become(request: Mapping[str, Any], starter: int) -> None:
    """Run the request's command in this process, which `starter` has forked."""
    os.setsid()
    end_with(starter)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _renew_state()
    sys.argv[:] = request["command"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _renew_state() -> None:
    """Set what the imported libraries would have set in a new Python: random numbers of its own, the number of threads.

    Python does so itself for `random`, and torch begins with the same seed in every process.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    with suppress(ValueError):
        if torch is not None:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "")))
