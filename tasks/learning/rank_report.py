"""A rank's side of the connection with its launcher on this machine: reports to it, orders from it."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


class RankReport:
    """A rank's end of the connection with its launcher (`tasks.learning.rank_process`)."""

    def __init__(self, orders: IO[bytes], answers: IO[bytes]) -> None:
        self._orders = orders
        self._answers = answers

    def orders(self) -> Iterator[dict[str, Any]]:
        """The launcher's orders, until it closes the connection."""
        for line in self._orders:
            yield json.loads(line)

    def tell(self, state: Any) -> None:
        """Report this rank's present work; the state must fit JSON."""
        self._write({"state": state})

    def done(self) -> None:
        """Report the end of this rank's work; the end of the process counts as success from now on."""
        self._write({"done": True})

    def fail(self, error: Exception, message: str, *, lasting: bool) -> None:
        """Report why this rank gives up. message: the reason, in one line. lasting: every attempt would fail alike."""
        failure = {
            "message": message,
            "lasting": lasting,
            "kinds": [each.__name__ for each in type(error).__mro__],
            "errno": error.errno if isinstance(error, OSError) else None,
        }
        # The clock is that of the machine, so that it is known which rank has failed first.
        self._write({"at_s": time.monotonic(), "failure": failure})

    def _write(self, told: dict[str, Any]) -> None:
        self._answers.write(json.dumps(told).encode() + b"\n")
        self._answers.flush()


@contextmanager
def reporting_to(address: str) -> Iterator[RankReport]:
    """The connection with the launcher that listens at the socket `address`, until the end of the block."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rb") as orders, connection.makefile("wb") as answers:
            yield RankReport(orders, answers)
