"""What a local execution shows of its run: on a terminal alone, and without any effect on the run."""

import json
import socket

import pytest

from resources.work_log import chain_of, end_one
from tasks.reporting.crew_view import RunView, Totals
from tasks.reporting.run_progress import run_line
from tests.terminals import on_terminal
from tests.viewed_run import write_viewed_run

PROGRAM = """
import sys, threading, time
from tasks.reporting.run_progress import run_progress

with run_progress(sys.argv[1]):
    time.sleep(float(sys.argv[2]))
    print(threading.active_count())
if len(sys.argv) > 3:
    with run_progress(sys.argv[1]):
        raise ValueError("of the run")
"""


HELD_UP = """
import sys, time
from tasks.reporting.run_progress import run_progress

with run_progress(sys.argv[1]):
    time.sleep(2)
    began_s = time.monotonic()
print(time.monotonic() - began_s)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The url of a run whose iteration 2 is generated."""
    return write_viewed_run(str(tmp_path_factory.mktemp("progress") / "run"), tmp_path_factory.mktemp("model")).url


def test_a_terminal_shows_where_the_run_is_and_nothing_when_the_block_has_ended(run):
    done = on_terminal("-c", PROGRAM, run, 10)  # a busy machine needs seconds for the first look
    assert "iteration 2: rollout" in done.terminal
    assert "responses (3 of 4)" in done.terminal
    assert done.terminal.rstrip().endswith("\x1b[2K")
    assert int(done.output) > 1


def test_a_dumb_terminal_is_not_looked_for(run):
    done = on_terminal("-c", PROGRAM, run, 0, TERM="dumb")
    assert (done.terminal, done.output) == ("", "1\n")


def test_what_cannot_be_looked_at_disturbs_nothing(tmp_path, run):
    assert on_terminal("-c", PROGRAM, tmp_path / "nowhere", 1).code == 0
    (tmp_path / "run.json").write_text(json.dumps({"format": 99}))
    assert on_terminal("-c", PROGRAM, tmp_path, 1).code == 0
    refused = on_terminal("-c", PROGRAM, "ftp://no.store/run", 1)
    assert (refused.code, refused.terminal) == (0, "")
    failed = on_terminal("-c", PROGRAM, run, 0, "raises")
    assert failed.code == 1
    assert "ValueError: of the run" in failed.terminal


def test_the_end_of_the_run_is_not_held_up_by_a_store_that_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        access = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        done = on_terminal("-c", HELD_UP, "s3://bucket/run", **access)
    assert done.code == 0, done.terminal
    # The first request alone is waited for 20 s.
    assert float(done.output) < 10


def test_the_line_says_what_is_known():
    totals = Totals(responses_planned=64, responses_done=40, tokens_per_s=1530.4, reward=0.4125)
    rollout = RunView(run_url="r", iteration=3, phase="rollout", totals=totals)
    assert run_line(rollout) == ("iteration 3: rollout, 1,530 tokens/s, reward so far 0.412, responses", 40, 64)
    training = RunView(run_url="r", iteration=3, phase="training", totals=totals)
    assert run_line(training) == ("iteration 3: training, reward so far 0.412", 0, 0)
    with chain_of(12):
        assert run_line(training)[0] == "iteration 3 (1 of 12): training, reward so far 0.412"
        end_one()
        assert run_line(RunView(run_url="r", iteration=4, phase="rollout"))[0].startswith(
            "iteration 4 (2 of 12): rollout"
        )
