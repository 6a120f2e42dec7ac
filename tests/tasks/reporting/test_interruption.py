"""Ctrl-C: one line that says what is kept, and the command that goes on."""

import os
import shlex
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gleaner import Commands
from tasks.reporting.interruption import announced_interruption, command
from tests.processes import ROOT
from tests.small_run import (
    Unreachable,
    commit_iteration,
    config,
    memory_store,
    plan_iteration,
    roll_out,
    train_small,
)

URL = "memory://interruption"
WORDS = ["/venv/bin/pyflyte", "run", "workflows/training.py", "training", "--config", "my run.yaml", "--count", "3"]


def interrupted(capsys, count, meanwhile=lambda: None):
    def work():
        with announced_interruption(URL, count):
            meanwhile()
            raise KeyboardInterrupt

    earlier = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        work()
    signal.signal(signal.SIGINT, earlier)
    assert end.value.code == 130
    return capsys.readouterr().err


@pytest.mark.slow
def test_it_names_what_the_run_keeps_and_the_command_with_the_iterations_that_are_left(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", WORDS)
    memory_store("interruption")

    def first_iteration():
        plan_iteration(config(URL, model))
        roll_out(URL, 0)
        train_small(URL, 0)
        commit_iteration(URL, 0)

    shown = f"pyflyte run workflows/training.py training --config {shlex.quote('my run.yaml')} --count"
    assert interrupted(capsys, 3, first_iteration) == (
        f"interrupted: {URL} keeps its 1 committed iteration, and all that was generated and recorded after that; "
        f"go on by: {shown} 2\n"
    )
    # What was there before the command was is not its work.
    assert interrupted(capsys, 3).endswith(f"{shown} 3\n")
    assert interrupted(capsys, 0).endswith("; nothing of what was asked for is left\n")


def test_a_run_that_cannot_be_read_is_no_reason_to_say_nothing(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", WORDS)
    memory_store("interruption", Unreachable())
    assert interrupted(capsys, 3).startswith(f"interrupted: what {URL} holds stays there; go on by: pyflyte run ")


def test_nothing_is_said_where_nothing_is_interrupted(capsys):
    memory_store("interruption")
    with announced_interruption(URL, 3):
        pass
    with pytest.raises(ValueError, match="another"), announced_interruption(URL, 3):
        raise ValueError("another")
    assert capsys.readouterr().err == ""


def test_another_handler_of_ctrl_c_such_as_flytekits_waits_for_the_end_of_the_block():
    def quietly(*_):
        sys.exit(1)

    memory_store("interruption")
    earlier = signal.signal(signal.SIGINT, quietly)
    try:
        with announced_interruption(URL, 3):
            assert signal.getsignal(signal.SIGINT) is not quietly
        assert signal.getsignal(signal.SIGINT) is quietly
        with pytest.raises(ValueError, match="another"), announced_interruption(URL, 3):
            raise ValueError("another")
        assert signal.getsignal(signal.SIGINT) is quietly
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_only_the_count_of_a_command_is_replaced():
    assert command(WORDS, 2).endswith("--count 2")
    assert command(["gleaner", "check", "a;b"]) == "gleaner check 'a;b'"
    assert command(["pyflyte", "--count"], 2) == "pyflyte --count"
    assert command(["pyflyte", "--count=12", "--config", "--count-of-words=1"], 2) == (
        "pyflyte --count=2 --config --count-of-words=1"
    )


# As `pyflyte run` does it: flytekit has a handler of its own for Ctrl-C, which ends the process without a word.
PROGRAM = """
import sys, time
import flytekit
from tasks.reporting.interruption import announced_interruption

sys.argv = ["pyflyte", "run", "--count", "3"]
with announced_interruption(sys.stdin.readline().strip(), 3):
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_under_flytekit_ctrl_c_is_heard_at_once_and_the_last_line_goes_on(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", tmp_path / "program.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    child.stdin.write(f"{tmp_path}/run\n")
    child.stdin.flush()
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=600)
    first, *_, last = told.splitlines()
    assert first == "interrupted: the processes of this command write what they have, and end within half a minute"
    assert last.startswith("interrupted: ")
    assert last.endswith("; go on by: pyflyte run --count 3")
    assert child.returncode == 130


def raising(error):
    def run():
        try:
            raise KeyboardInterrupt
        finally:
            raise error

    return run


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError("of a process that was ended, too")])
def test_a_command_of_gleaner_says_what_has_become_of_its_work_and_ends_with_130(error, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/venv/bin/gleaner", "sweep", "a run"])
    group = Commands("gleaner")
    for name in ("sweep", "export"):
        group.command(name)(raising(error))
    for name, kept in (("sweep", "what it has deleted so far no run needs"), ("export", "nothing is left half done")):
        result = CliRunner().invoke(group, [name])
        assert result.exit_code == 130
        assert result.stderr == f"gleaner: interrupted; {kept}; the same command again: gleaner sweep 'a run'\n"


def test_other_errors_of_a_command_are_told_as_ever():
    group = Commands("gleaner")

    @group.command()
    def export():
        raise ValueError("dtype: value 1; allowed: 2")

    result = CliRunner().invoke(group, ["export"])
    assert (result.exit_code, result.stderr) == (1, "gleaner: dtype: value 1; allowed: 2\n")
