"""One process of a worker: started, given orders and heard by the host's process."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from resources.local_starter import running_starter
from storage.fleet_records import AdmittedRun
from tasks.sharing.rank_states import RankEnd
from tasks.sharing.workers import WorkerPhase, WorkerState

STATES = TypeAdapter(WorkerState)
PROGRAM = Path(__file__).with_name("worker_process.py")
IMPORTS = ("tasks.sharing.phase_trainer", "transformers.modeling_utils")
END_TIME_LIMIT_S = 60.0


class RankProcess:
    """A rank of a worker. Threads keep its state up to date, and hand it orders once it has connected.

    folder: of the worker's ranks alone, where they find each other. disk: for copies of the run's state. changed: is
    called, in a thread of this rank's, when the process has said that it fails, and when it has ended.
    """

    def __init__(
        self, run: AdmittedRun, rank: int, folder: Path, disk: Path | None, changed: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._changed = changed
        self._lock = threading.Lock()
        self._state = WorkerState()
        self._failure: tuple[float, WorkerState] | None = None
        self._end: RankEnd | None = None
        self._killed = False
        self._connection: socket.socket | None = None
        self._orders: list[bytes] = []
        self._listener = socket.socket(socket.AF_UNIX)
        address = str(folder / f"rank{rank}")
        command = [str(PROGRAM), run.run_url, address, "" if disk is None else str(disk)]
        # The variables of torch's launchers.
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run.ranks)}
        try:
            self._listener.bind(address)
            self._listener.listen(1)
            self._process = running_starter(os.environ).start(command, {**os.environ, **place}, IMPORTS)
        except BaseException:
            self._listener.close()
            raise
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._attend_end)]
        for thread in self._threads:
            thread.start()

    @property
    def state(self) -> WorkerState:
        """What it said last, other than that it fails, or what it was told since."""
        with self._lock:
            return self._state

    @property
    def has_failed(self) -> bool:
        """Whether it has said that it fails, or has ended."""
        with self._lock:
            return self._failure is not None or self._end is not None

    @property
    def end(self) -> RankEnd | None:
        """How it ended; None while it runs."""
        with self._lock:
            return self._end

    def order(self, phase: WorkerPhase, order: Mapping[str, Any]) -> None:
        """Give it an order; until it says more, it does `phase`."""
        with self._lock:
            # What it holds stays so until it says more.
            self._state = replace(self._state, phase=phase, iteration=order["iteration"], restored=None, replays=0)
            self._orders.append(json.dumps(order).encode() + b"\n")
            self._send()

    def kill(self) -> None:
        """End it at once, if it has not ended; does not wait."""
        with self._lock:
            self._killed = self._end is None
        self._process.send_signal(signal.SIGKILL)

    def join(self) -> None:
        """Wait until it has ended: its device and its memory are free then."""
        for thread in self._threads:
            thread.join(END_TIME_LIMIT_S)

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
                        self._hear(json.loads(line))
                with self._lock:
                    self._connection = None

    def _hear(self, told: Mapping[str, Any]) -> None:
        state = STATES.validate_python(told["state"])
        if state.phase != "failed":
            with self._lock:
                self._state = state
            return
        with self._lock:
            self._failure = (float(told["at_s"]), state)
        self._changed()

    def _attend_end(self) -> None:
        code = self._process.wait()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        with self._lock:
            at_s, failure = self._failure or (0.0, None)
            killed = self._killed and code == -signal.SIGKILL
            self._end = RankEnd(rank=self._rank, code=code, killed=killed, failure=failure, told_at_s=at_s)
        self._changed()
