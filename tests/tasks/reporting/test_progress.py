"""The line of progress: on a real terminal, and nowhere else."""

import json
import re
import signal
import subprocess
import sys

import pytest
import yaml

from resources.notice import EXIT_CODE
from tests.forecast_documents import document
from tests.terminals import ROOT, on_terminal

GLEANER = ("-m", "gleaner")
ERASED, CURSOR_HIDDEN = "\x1b[2K", "\x1b[?25l"
COLOUR = "\x1b[38;5;"


PROGRAM = """
import time
from tasks.reporting.progress import progress

with progress() as shown:
    shown.tell("working", 1, 3)
    time.sleep(0.3)
"""


TOLD_TO_END = """
import os, sys, time
from resources.ending import ends_on_notice
from tasks.reporting.progress import progress

with ends_on_notice(), progress() as shown:
    shown.tell("working", 1, 3)
    time.sleep(0.3)
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(60)
"""


@pytest.fixture
def testing(tmp_path):
    return (*GLEANER, "check", "--store", tmp_path / "store", "--keys", 3)


@pytest.fixture(scope="module")
def forecasting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast")
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(document(str(folder / "run"), forecast={"widths": [2]})))
    return (*GLEANER, "forecast", file)


def test_a_terminal_shows_what_happens_and_keeps_nothing_of_it(testing):
    done = on_terminal(*testing)
    assert done.code == 0
    assert "testing " in done.terminal
    assert "0:00:0" in done.terminal
    assert done.terminal.rstrip().endswith(ERASED)
    assert CURSOR_HIDDEN not in done.terminal
    # The result goes to standard output, line by line, and has nothing of a terminal.
    assert "\x1b" not in done.output
    assert done.output.endswith("is fit\n")
    assert "one winner among threads: " in done.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_told_to_end_leaves_the_cursor_of_its_terminal_shown(number):
    done = on_terminal("-c", TOLD_TO_END, int(number))
    assert done.code in (EXIT_CODE, -signal.SIGKILL)
    assert "working (1 of 3)" in done.terminal
    assert CURSOR_HIDDEN not in done.terminal


def test_a_pipe_gets_nothing(testing):
    done = subprocess.run([sys.executable, *map(str, testing)], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


def test_json_comes_without_progress(testing):
    done = on_terminal(*testing, "--json")
    assert done.terminal == ""
    assert json.loads(done.output)["fit"]


def test_a_dumb_terminal_gets_nothing():
    assert on_terminal("-c", PROGRAM, TERM="dumb").terminal == ""


def test_colours_are_left_out_where_they_are_not_wanted():
    assert COLOUR in on_terminal("-c", PROGRAM).terminal
    plain = on_terminal("-c", PROGRAM, NO_COLOR="1").terminal
    assert "working (1 of 3)" in plain
    assert COLOUR not in plain


def test_forced_colours_are_no_terminal():
    done = subprocess.run(
        ["env", "FORCE_COLOR=1", sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_lines_of_the_result_stay_whole_on_one_terminal_with_the_progress(testing):
    shown = screen_of(on_terminal(*testing, whole=True).terminal)
    assert [line.partition(":")[0] for line in shown[:3]] == [
        "a second create is refused",
        "one winner among threads",
        "one winner among processes",
    ]
    assert shown[-1].endswith("is fit")
    assert not any("testing " in line for line in shown)


def test_a_forecast_counts_its_simulations(forecasting):
    done = on_terminal(*forecasting)
    assert re.search(r"simulating .* \([0-4] of 5\)", done.terminal)
    assert done.terminal.rstrip().endswith(ERASED)
    assert "Recommended: " in done.output


def test_an_error_follows_the_line_of_progress(tmp_path):
    shown = on_terminal(*GLEANER, "export", tmp_path, "--rollouts", "--to", tmp_path / "out", whole=True)
    assert shown.code == 1
    assert screen_of(shown.terminal)[-1].startswith("gleaner: ")


def screen_of(written: str) -> list[str]:
    """The lines that a terminal shows in the end, for the few control sequences that the line of progress uses."""
    lines, row, column = [""], 0, 0
    at = 0
    while at < len(written):
        character = written[at]
        at += 1
        if character == "\x1b":
            end = at + 1
            while not written[end].isalpha():
                end += 1
            number, kind = written[at + 1 : end], written[end]
            at = end + 1
            if kind == "A":
                row = max(0, row - int(number or 1))
            elif kind == "K":
                lines[row] = "" if number == "2" else lines[row][:column]
            else:
                assert kind in "mhl", f"unknown sequence {number}{kind}"
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif character == "\r":
            column = 0
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]
