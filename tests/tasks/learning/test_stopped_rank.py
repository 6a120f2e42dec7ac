"""A rank that a signal has stopped: its launcher says so, and waits for it for a bounded time."""

import os
import signal
import time
from pathlib import Path

import pytest

from tasks.learning.started_ranks import StartedRanks
from tests.processes import wait_until

pytestmark = pytest.mark.slow

# Says that it is there, and then waits for ever, as in a collective whose other ranks do not come.
PROGRAM = """
import json, os, socket, sys, time
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(json.dumps({"state": os.getpid()}).encode() + b"\\n")
time.sleep(600)
"""


@pytest.fixture
def program(tmp_path) -> Path:
    file = tmp_path / "waits.py"
    file.write_text(PROGRAM)
    return file


def processes(ranks) -> list[int]:
    wait_until(lambda: all(ranks.states))
    return ranks.states


def test_it_is_named_after_ten_seconds_with_what_lets_it_go_on_and_given_up_at_the_limit(program, caplog):
    with StartedRanks(program, [], (), 2, 0, int, stopped_limit_s=13.0) as ranks:
        _, stopped = processes(ranks)
        os.kill(stopped, signal.SIGSTOP)
        # No launcher that overlooks the rank keeps the test for ever.
        until_s = time.monotonic() + 90.0
        wait_until(lambda: ranks.failure is not None or time.monotonic() > until_s)
        failure = ranks.failure
    assert failure is not None
    assert failure.message == f"rank 1 (process {stopped}) was stopped by a signal for 13 s"
    assert not failure.lasting
    [told] = [record.getMessage() for record in caplog.records if record.name == "storage.waiting"]
    assert told.startswith(f"waiting for rank 1 (process {stopped}), which a signal has stopped (state T), since ")
    assert told.endswith(f"; then all ranks are ended; `kill -CONT {stopped}` lets what is stopped go on")


def test_one_that_goes_on_in_time_is_not_given_up(program):
    with StartedRanks(program, [], (), 2, 0, int, stopped_limit_s=4.0) as ranks:
        first, second = processes(ranks)
        os.kill(second, signal.SIGSTOP)
        wait_until(lambda: ranks._waiting._who)
        os.kill(second, signal.SIGCONT)
        wait_until(lambda: not ranks._waiting._who)
        assert ranks.failure is None
        os.kill(first, signal.SIGKILL)
        assert "rank 0 ended with -9" in ranks.wait().message
