"""The launcher's side of a rank on this machine: a process with a connection for orders and reports.

Both sides write JSON lines to a socket in a folder of this user alone. The rank reports its work (`state`), the end of
its work, or the reason for a failure (`tasks.learning.rank_report`).
"""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from resources.local_starter import running_starter
from tasks.learning.rank_ends import RankEnd, RankFailure

State = TypeVar("State")
FAILURE = TypeAdapter(RankFailure)
END_TIME_LIMIT_S = 60.0


class RankProcess(Generic[State]):
    """A rank's process. Threads update its state, and send orders as soon as the process has connected.

    Args:
        program: The program; gets the address of the socket and `arguments`.
        arguments: Further arguments of the program.
        imports: The modules that the program imports.
        folder: The folder of the sockets.
        rank: The number of the rank.
        world_size: The number of ranks.
        state: The state until the first report.
        read: Makes a state from the JSON value of a report.
        changed: Called, in a thread of this rank's, after each report of a state or a failure, and after the process's
            end.
    """

    def __init__(
        self,
        program: Path,
        arguments: Sequence[str],
        imports: Sequence[str],
        folder: Path,
        rank: int,
        world_size: int,
        state: State,
        read: Callable[[Any], State],
        changed: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._read_state = read
        self._changed = changed
        self._lock = threading.Lock()
        self._state = state
        self._done = False
        self._failure: tuple[float, RankFailure] | None = None
        self._end: RankEnd | None = None
        self._killed = False
        self._connection: socket.socket | None = None
        self._orders: list[bytes] = []
        self._listener = socket.socket(socket.AF_UNIX)
        address = str(folder / f"rank{rank}")
        # The variables of torch's launchers.
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        try:
            self._listener.bind(address)
            self._listener.listen(1)
            command = [str(program), address, *arguments]
            self._process = running_starter(os.environ).start(command, {**os.environ, **place}, imports)
        except BaseException:
            self._listener.close()
            raise
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._attend_end)]
        for thread in self._threads:
            thread.start()

    @property
    def state(self) -> State:
        """The last state reported by the process, or the state implied by a newer order. Failures: see `has_failed`."""
        with self._lock:
            return self._state

    @property
    def has_failed(self) -> bool:
        """Whether the rank has reported a failure, or its process has ended without reporting the end of the work."""
        with self._lock:
            return self._failure is not None or (self._end is not None and not self._end.done)

    @property
    def end(self) -> RankEnd | None:
        """The end of the process; None while the process runs."""
        with self._lock:
            return self._end

    @property
    def number(self) -> int:
        return self._rank

    @property
    def stopped(self) -> int | None:
        """The id of the rank's process, or its starter's, while a signal (SIGSTOP) has stopped the process, or None."""
        return None if self.end is not None else self._process.stopped

    def order(self, order: Mapping[str, Any], then: Callable[[State], State]) -> None:
        """Send an order; until the next report, the state is `then(state)`."""
        with self._lock:
            self._state = then(self._state)
            self._orders.append(json.dumps(order).encode() + b"\n")
            self._send()

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        with self._lock:
            self._killed = self._end is None
        self._process.kill()

    def join(self) -> None:
        """Wait for the end of the process, after which its device and its memory are free."""
        for thread in self._threads:
            thread.join(END_TIME_LIMIT_S)

    def _send(self) -> None:
        """Send waiting orders if the process has connected; the caller holds the lock."""
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
        with self._lock:
            if "state" in told:
                self._state = self._read_state(told["state"])
            elif "failure" in told:
                self._failure = (float(told["at_s"]), FAILURE.validate_python(told["failure"]))
            else:
                self._done = True
                return
        self._changed()

    def _attend_end(self) -> None:
        code = self._process.wait()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        with self._lock:
            at_s, failure = self._failure or (0.0, None)
            self._end = RankEnd(
                rank=self._rank,
                code=code,
                killed=self._killed and code == -signal.SIGKILL,
                done=self._done and code == 0,
                failure=failure,
                reported_at_s=at_s,
            )
        self._changed()
