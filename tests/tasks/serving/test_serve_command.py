"""The command `gleaner serve`: what it refuses before it listens, and how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from click.testing import CliRunner

from storage.records.run import AnotherRun
from tasks.external.rollouts import Rollouts
from tasks.reporting.config_argument import GivenConfig
from tasks.serving.serve_command import KEY_VARIABLE, WINDOWS_AHEAD, NotServed, read_settings, serve
from tests.served_run import SECTIONS, settings
from tests.small_run import document

KEY = "a-key-of-enough-characters"


def serve_error(tmp_path, given, *options, key=KEY):
    """The error with which the command ends; its port is taken, so it ends at the latest when it would listen."""
    file = tmp_path / "served.json"
    file.write_text(json.dumps(given))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = [str(file), "--listen", f"127.0.0.1:{taken.getsockname()[1]}", *options]
        result = CliRunner().invoke(serve, arguments, env={KEY_VARIABLE: key})
    return result.exception


def test_a_run_of_other_settings_is_refused_before_the_port_is_opened(tmp_path, model):
    url = str(tmp_path / "run")
    with Rollouts(settings(url, model)) as rollouts:
        rollouts.submit(0, [{"prompt": "1+1=", "request": "one"}])
    given = document(url, model, **SECTIONS)
    assert "it cannot be used" in str(serve_error(tmp_path, given))
    error = serve_error(tmp_path, given | {"sampling": {"max_completion_length": 40, "temperature": 0.5}})
    assert isinstance(error, AnotherRun)
    assert "sampling.temperature: 0.5 here, 1.0 there" in str(error)


def test_windows_overlap_in_a_new_run_unless_the_file_says_otherwise_and_as_they_did_in_an_older_one(tmp_path, model):
    def ahead(**algorithm):
        file = tmp_path / "served.json"
        given = document(str(tmp_path / "run"), model, **SECTIONS)
        file.write_text(json.dumps(given | {"algorithm": {"micro_batch_order": "arrival"} | algorithm}))
        return read_settings(GivenConfig(path=file, overrides=())).algorithm.max_staleness

    assert (ahead(), ahead(max_staleness=0), ahead(max_staleness=3)) == (WINDOWS_AHEAD, 0, 3)
    with Rollouts(settings(str(tmp_path / "run"), model)) as rollouts:
        rollouts.submit(0, [{"prompt": "1+1=", "request": "one"}])
    assert ahead() == SECTIONS["algorithm"]["max_staleness"]


def test_a_key_that_others_can_read_or_guess_is_refused_and_not_repeated(tmp_path, model):
    given, file = document(str(tmp_path / "run"), model, **SECTIONS), tmp_path / "key"
    for text, mode in ((KEY, 0o640), ("short", 0o600), (f"{KEY} {KEY}", 0o600)):
        file.write_text(text)
        file.chmod(mode)
        error = serve_error(tmp_path, given, "--key-file", str(file))
        assert isinstance(error, NotServed)
        assert text not in str(error)
    assert isinstance(serve_error(tmp_path, given, key="short"), NotServed)


@pytest.mark.slow
def test_the_command_serves_until_ctrl_c(tmp_path, model):
    file = tmp_path / "served.json"
    file.write_text(json.dumps(document(str(tmp_path / "run"), model, **SECTIONS)))
    command = [sys.executable, "-m", "gleaner", "serve", str(file), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, env=os.environ | {KEY_VARIABLE: KEY}, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        url = next(line.split(" at ")[1].split()[0] for line in lines if line.startswith("serving "))
        asked = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert json.load(answer)["data"][0]["id"] == "policy"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
