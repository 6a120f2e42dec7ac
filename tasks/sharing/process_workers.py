"""The workers of a host as processes of this machine, one for each run that has trained here.

They are forked from one process that has imported torch, so a cold worker reads its checkpoint at once.
"""

import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from resources.local_starter import running_starter
from storage.fleet_records import AdmittedRun
from tasks.sharing.workers import WorkerPhase, WorkerState

log = logging.getLogger(__name__)
STATES = TypeAdapter(WorkerState)
PROGRAM = Path(__file__).with_name("worker_process.py")
IMPORTS = ("tasks.sharing.phase_trainer", "transformers.modeling_utils")
END_TIME_LIMIT_S = 60.0


class _Worker:
    """One worker process. Threads keep its state up to date, and hand it orders once it has connected."""

    def __init__(self, run: AdmittedRun, disk: Path | None) -> None:
        self._lock = threading.Lock()
        self._state = WorkerState()
        self._connection: socket.socket | None = None
        self._orders: list[bytes] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gleaner-worker-")
        self._listener = socket.socket(socket.AF_UNIX)
        address = str(Path(self._folder.name) / "socket")
        self._listener.bind(address)
        self._listener.listen(1)
        command = [str(PROGRAM), run.run_url, address, "" if disk is None else str(disk)]
        self._process = running_starter(os.environ).start(command, os.environ, IMPORTS)
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._attend_end)]
        for thread in self._threads:
            thread.start()

    @property
    def state(self) -> WorkerState:
        with self._lock:
            return self._state

    def begin(self, iteration: int, *, onto_disk: bool) -> None:
        self._order("restoring", {"do": "train", "iteration": iteration, "onto_disk": onto_disk})

    def prefetch(self, iteration: int) -> None:
        self._order("prefetching", {"do": "prefetch", "iteration": iteration})

    def _order(self, phase: WorkerPhase, order: Mapping[str, Any]) -> None:
        with self._lock:
            # What it holds stays so until it says more.
            self._state = replace(self._state, phase=phase, iteration=order["iteration"], restored=None, replays=0)
            self._orders.append(json.dumps(order).encode() + b"\n")
            self._send()

    def end(self) -> None:
        """Kill the process and wait for its end: the device and its memory are free then."""
        self._process.send_signal(signal.SIGKILL)
        with suppress(TimeoutError):
            self._process.wait(END_TIME_LIMIT_S)
        for thread in self._threads:
            thread.join(END_TIME_LIMIT_S)
        self._folder.cleanup()

    def _send(self) -> None:
        """Hand over the orders, if the process has connected; called with the lock."""
        if self._connection is not None:
            # If it has ended, the thread that attends its end says so.
            with suppress(OSError):
                self._connection.sendall(b"".join(self._orders))
            self._orders.clear()

    def _read(self) -> None:
        # The listener is closed when the process has ended.
        with suppress(OSError):
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as answers:
                with self._lock:
                    self._connection = connection
                    self._send()
                for line in answers:
                    # A line that was cut off is the last one.
                    if line.endswith(b"\n"):
                        with self._lock:
                            self._state = STATES.validate_json(line)
                with self._lock:
                    self._connection = None

    def _attend_end(self) -> None:
        code = self._process.wait()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        with self._lock:
            failed = replace(self._state, phase="failed", digest=None, bytes_held=0)
            reason = f"its process ended with {code}"
            self._state = failed if self._state.phase == "failed" else replace(failed, message=reason)


class ProcessWorkers:
    """See `tasks.sharing.workers.PhaseWorkers`. A context manager: at its end no worker is left.

    disk: a folder for copies of states, with a folder for each run; None: there is no disk for them.
    """

    def __init__(self, disk: Path | None = None) -> None:
        self._disk = disk
        self._workers: dict[str, _Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for run_id in list(self._workers):
            self.evict(run_id)

    def begin(self, run: AdmittedRun, iteration: int, *, onto_disk: bool) -> None:
        self._worker(run).begin(iteration, onto_disk=onto_disk)

    def prefetch(self, run: AdmittedRun, iteration: int) -> None:
        self._worker(run).prefetch(iteration)

    def _worker(self, run: AdmittedRun) -> _Worker:
        """The run's worker; a new one if there is none, or if it has ended."""
        if self.state(run.id).phase == "failed":
            self.evict(run.id)
        if run.id not in self._workers:
            self._workers[run.id] = _Worker(run, None if self._disk is None else self._disk / run.id)
        return self._workers[run.id]

    def state(self, run_id: str) -> WorkerState:
        worker = self._workers.get(run_id)
        return WorkerState() if worker is None else worker.state

    def evict(self, run_id: str) -> None:
        worker = self._workers.pop(run_id, None)
        if worker is not None:
            worker.end()

    def drop_copy(self, run_id: str) -> None:
        if self._disk is not None:
            shutil.rmtree(self._disk / run_id, ignore_errors=True)

    def kill(self, run_id: str) -> None:
        self.evict(run_id)
