"""Ctrl-C of a whole `pyflyte run`, as a user gives it: what is said, what stays, and the command that goes on."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resources.process import descendants
from storage.records import layout
from storage.records.run import exists
from storage.stores.connect import connect
from tests.processes import are_gone, wait_until
from tests.whole_runs import KILLABLE, ROOT, config_file, ended, pyflyte


def interrupted(child: "subprocess.Popen[str]") -> tuple[str, list[str]]:
    """What it has printed, and the command that goes on, after Ctrl-C."""
    processes = descendants(child.pid)
    child.send_signal(signal.SIGINT)
    told = ended(child, code=130)
    wait_until(lambda: are_gone(processes))
    assert "Traceback" not in told
    found = re.search(r"interrupted: (\S+) keeps its \d committed iterations?, and all that .*; go on by: (.*)$", told)
    assert found is not None, told
    return found[1], shlex.split(found[2])


@pytest.mark.slow
def test_it_ends_in_rollout_and_in_training_with_a_line_and_no_process_stays(tmp_path, model):
    url = str(tmp_path / "run")
    config = config_file(tmp_path, model, url, **KILLABLE)
    child = pyflyte("training", "--config", str(config), "--count", "2")
    wait_until(lambda: Path(url).exists() and connect(url).list(layout.alive_all(0)) != [])
    kept, command = interrupted(child)
    assert kept == url
    assert command[0] == "pyflyte"
    assert command[-4:] == ["--config", str(config), "--count", "2"]
    command[0] = str(Path(sys.executable).parent / command[0])
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    wait_until(lambda: exists(connect(url), layout.closed(0)))
    interrupted(child)
