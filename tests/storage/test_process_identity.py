"""Which processes of this machine live, by their names."""

import os
import subprocess
import sys

import pytest

from storage.process_identity import has_ended, is_dead, number_here, process_name, process_space


def test_this_process_lives():
    assert number_here(process_name()) == os.getpid()
    assert not has_ended(process_name())


def test_a_number_that_was_given_again_names_another_process():
    name, _, start = process_name().rpartition("-")
    before = f"{name}-{int(start) - 1}"
    assert number_here(before) is None
    assert has_ended(before)


@pytest.mark.parametrize(
    "name",
    [
        "a1b2c3d4e5",  # a Flyte execution
        "here:elsewhere:1",
        f"here:elsewhere:1:{'0' * 32}-17",  # another machine, or another container of this one
        "here::::",
        f"here:{'9' * 30}:{'9' * 30}:{'0' * 32}-{'9' * 30}",
        f"here:x:0:{process_space()}-0",  # no process has this number
        f"here:x:{'9' * 30}:{process_space()}-17",
        f"here:x:1:{process_space()}-{'9' * 5000}",
    ],
)
def test_of_processes_elsewhere_nothing_is_known(name):
    assert number_here(name) is None
    assert not has_ended(name)


def test_a_process_that_its_parent_has_not_waited_for_has_ended():
    with subprocess.Popen(
        [sys.executable, "-c", "from storage.process_identity import process_name; print(process_name())"],
        stdout=subprocess.PIPE,
        text=True,
    ) as ended:
        name = ended.stdout.read().strip()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(name)
        assert is_dead(ended.pid)
    assert has_ended(name)
    assert has_ended(f"here:x:4194305:{process_space()}-17")  # above the largest number of Linux
