"""The workers of a host as processes of this machine, one for each run that has trained here."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import IO, Self

from pydantic import TypeAdapter

from storage.fleet_records import AdmittedRun
from tasks.sharing.workers import WorkerState

STATES = TypeAdapter(WorkerState)
END_TIME_LIMIT_S = 30.0


class _Worker:
    """One worker process; its state is kept up to date by a thread."""

    def __init__(self, run: AdmittedRun) -> None:
        self._lock = threading.Lock()
        self._state = WorkerState()
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", "tasks.sharing.worker_process", run.run_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ),
        )
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        self._orders: IO[bytes] = self._process.stdin
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def state(self) -> WorkerState:
        with self._lock:
            return self._state

    def begin(self, iteration: int) -> None:
        with self._lock:
            self._state = WorkerState(phase="restoring", iteration=iteration)
        try:
            self._orders.write(json.dumps({"iteration": iteration}).encode() + b"\n")
            self._orders.flush()
        except OSError:
            # It has ended; the thread that reads from it says so.
            return

    def end(self) -> None:
        """End the process and wait for it: the device and the memory are free then."""
        self._process.kill()
        self._process.wait(END_TIME_LIMIT_S)
        self._reader.join(END_TIME_LIMIT_S)
        self._orders.close()

    def _read(self, answers: IO[bytes]) -> None:
        with answers:
            for line in answers:
                # A line that was cut off is the last one.
                if line.endswith(b"\n"):
                    with self._lock:
                        self._state = STATES.validate_json(line)
        code = self._process.wait()
        with self._lock:
            if self._state.phase != "failed":
                reason = f"its process ended with {code}"
                self._state = WorkerState(phase="failed", iteration=self._state.iteration, message=reason)
            else:
                self._state = replace(self._state, bytes_held=0, digest=None)


class ProcessWorkers:
    """See `tasks.sharing.workers.PhaseWorkers`. A context manager: at its end no worker is left."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for run_id in list(self._workers):
            self.evict(run_id)

    def begin(self, run: AdmittedRun, iteration: int) -> None:
        """Wake the run's worker, or start one; raises OSError if the machine cannot start a process."""
        worker = self._workers.get(run.id)
        if worker is not None and worker.state.phase == "failed":
            self.evict(run.id)
            worker = None
        if worker is None:
            worker = self._workers[run.id] = _Worker(run)
        worker.begin(iteration)

    def state(self, run_id: str) -> WorkerState:
        worker = self._workers.get(run_id)
        return WorkerState() if worker is None else worker.state

    def evict(self, run_id: str) -> None:
        worker = self._workers.pop(run_id, None)
        if worker is not None:
            worker.end()

    def kill(self, run_id: str) -> None:
        self.evict(run_id)

    def pid(self, run_id: str) -> int | None:
        """The process of the run's worker; None if there is none."""
        worker = self._workers.get(run_id)
        return None if worker is None else worker.pid
