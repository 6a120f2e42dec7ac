"""The command `gleaner view`."""

import re
import socket

import pytest
from click.testing import CliRunner

from gleaner import main
from resources.local_http import LOOPBACK
from storage.stores.connect import connect
from tests.committed_runs import begin

pytestmark = pytest.mark.slow


def test_a_run_is_written_as_a_file(tmp_path):
    begin(connect(str(tmp_path / "run")))
    result = CliRunner().invoke(main, ["view", str(tmp_path / "run"), "--to", str(tmp_path / "run.html")])
    assert result.exit_code == 0
    assert re.match(rf"{tmp_path}/run.html: 0 responses, [\d,]+ bytes$", result.stdout)
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_port_in_use_is_named(tmp_path):
    begin(connect(str(tmp_path / "run")))
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, ["view", str(tmp_path / "run"), "--port", str(port)])
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith(f"gleaner: port: value {port}; it cannot be used")
