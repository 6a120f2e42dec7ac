"""The lines of a process about its work: when they come, what they hold, and what they never do."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from resources import work_log as lines
from resources.work_log import LINE_CHARACTERS_MAX, at_work, chain_of, end_one, which_of_chain, work_log
from tests.processes import wait_until

ROOT = Path(__file__).parents[2]
PLACE = "run s3://b/r, iteration 3, slot 2, rollout"
WAITS_FOR_A_READER = """
import sys, time
from resources.work_log import at_work, work_log

began_s = time.monotonic()
with work_log("a place " + 250 * "x"):
    for number in range(2000):
        at_work(f"doing {number}")
    sys.stdout.write("done")
    sys.stdout.flush()
"""


def told(capsys):
    """The lines so far, without their times."""
    got = capsys.readouterr().err.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC ", line) for line in got)
    return [line[24:] for line in got]


def test_it_says_what_is_done_at_the_beginning_at_each_change_and_at_the_end(capsys):
    with work_log(PLACE):
        at_work("starting the engine")
        at_work("generating", lambda: "3 of 64 responses ended")
        at_work("generating", lambda: "9 of 64 responses ended")
    at_work("something after the end")
    assert told(capsys) == [
        f"{PLACE}: begins",
        f"{PLACE}: starting the engine",
        f"{PLACE}: generating: 3 of 64 responses ended",
        f"{PLACE}: ends, after 0 s",
    ]


def test_what_lasts_is_said_again_with_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(lines, "INTERVAL_S", 0.05)
    seen = []

    def how_far():
        seen.append(len(seen))
        return f"look {len(seen)}"

    with work_log(PLACE):
        at_work("generating", how_far)
        wait_until(lambda: len(seen) >= 3)
    got = told(capsys)
    assert got[1:4] == [f"{PLACE}: generating: look {number}" for number in (1, 2, 3)]


def test_a_line_comes_at_least_once_a_minute():
    assert lines.INTERVAL_S <= 50


def test_a_failure_is_said_and_raised(capsys):
    with pytest.raises(ValueError, match="bad"), work_log(PLACE):
        raise ValueError("bad data")
    assert told(capsys)[-1] == f"{PLACE}: failed: ValueError: bad data, after 0 s"


def test_where_it_is_brief_only_what_lasts_and_a_failure_are_said(capsys, monkeypatch):
    with work_log(PLACE, is_brief=True) as log:
        at_work("quick")
        log.tell("committed")
    assert told(capsys) == [f"{PLACE}: begins", f"{PLACE}: committed"]
    monkeypatch.setattr(lines, "INTERVAL_S", 0.05)
    looked = threading.Event()

    def work():
        at_work("slow", lambda: looked.set() or "half")
        looked.wait(60)
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"), work_log(PLACE, is_brief=True):
        work()
    got = told(capsys)
    assert f"{PLACE}: slow: half" in got
    assert got[-1].startswith(f"{PLACE}: failed: ValueError: bad")


def test_what_cannot_be_said_ends_nothing(capsys):
    def raises():
        raise RuntimeError("dictionary changed size during iteration")

    with work_log(PLACE):
        at_work("generating", raises)
        at_work("closing")
    assert told(capsys)[1:3] == [f"{PLACE}: generating", f"{PLACE}: closing"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb: begins\r\x1b[31m\u202e", r"a\x0ab: begins\x0d\x1b[31m\u202e"),
        ("s3://key:secret@host/b", "s3://key:***@host/b"),
        ("https://h/x?sig=abcdef&a=1", "https://h/x?sig=***&a=1"),
        (f"hf_{'aB3' * 11}x", "***"),
        ("AKIA" + "A1" * 8, "***"),
        ("a word of the environment: correct-horse", "a word of the environment: ***"),
    ],
)
def test_a_line_holds_no_control_character_and_no_secret_wherever_it_comes_from(text, shown, capsys, monkeypatch):
    monkeypatch.setenv("DB_PASS", "correct-horse")
    with work_log(f"run {text}") as log:
        at_work(f"doing {text}", lambda: f"at {text}")
        log.tell(f"told {text}")
    got = told(capsys)
    assert len(got) == 4
    assert got[1] == f"run {shown}: doing {shown}: at {shown}"
    assert got[2] == f"run {shown}: told {shown}"


def test_a_line_is_bounded_and_keeps_what_is_done(capsys):
    with work_log("x" * 5000):
        at_work("generating", lambda: "\n" * 5000)
    got = capsys.readouterr().err.splitlines()
    assert all(len(line) <= LINE_CHARACTERS_MAX for line in got)
    assert all("x..." in line for line in got)
    assert "generating" in got[1]


def test_no_work_waits_for_a_log_that_no_process_reads():
    with subprocess.Popen(
        [sys.executable, "-c", WAITS_FOR_A_READER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as child:
        assert child.stdout.read(4) == b"done"
        child.stderr.read(10)
        child.kill()


def test_a_closed_standard_error_ends_nothing():
    code = "import os; os.close(2)\nfrom resources.work_log import *\nwith work_log('p'): at_work('a')\nprint('done')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True).stdout == b"done\n"


def test_without_a_log_nothing_is_written_and_a_number_of_a_chain_is_known_within_it_alone(capsys):
    at_work("generating", lambda: pytest.fail("nobody asked"))
    assert which_of_chain() == ""
    with chain_of(2):
        assert which_of_chain() == " (1 of 2)"
        end_one()
        assert which_of_chain() == " (2 of 2)"
        end_one()
        assert which_of_chain() == " (2 of 2)"
    assert which_of_chain() == ""
    time.sleep(0)
    assert capsys.readouterr().err == ""


def test_a_child_that_is_forked_in_the_block_may_leave_it(capfd):
    child, code = -1, 1
    try:
        with work_log(PLACE):
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        code = 7
    finally:
        if not child:
            os._exit(code)
    assert told(capfd) == [f"{PLACE}: begins", f"{PLACE}: ends, after 0 s"]
