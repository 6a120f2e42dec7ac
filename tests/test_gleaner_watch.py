"""`gleaner watch` as a user meets it: once, as JSON, in a pipe, on a terminal, and until Ctrl-C."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from gleaner import main
from storage.records import layout, records
from storage.stores.connect import connect
from tests.committed_runs import begin
from tests.journals import Incarnation, a_plan
from tests.small_run import commit_iteration, config, model_directory, plan_iteration, roll_out, train_small

ROOT = Path(__file__).parents[1]
PLAN = a_plan(groups=2, generations=2, slots=2)


def watch(*arguments):
    return CliRunner().invoke(main, ["watch", *(str(argument) for argument in arguments)], catch_exceptions=False)


@pytest.fixture
def url(tmp_path):
    """A run with one member that has written something."""
    store = connect(str(tmp_path / "run"))
    begin(store)
    records.commit(store, layout.plan(0), PLAN)
    member = Incarnation(store, PLAN, 0, "00000-abcd")
    member.write(0, [1, 2, 3])
    member.announce(started_at_s=0.0, updated_at_s=0.0, tokens_generated=3, gone=False)
    return str(tmp_path / "run")


def test_once_as_json_is_one_object_for_scripts(url):
    result = watch(url, "--once", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    [line] = result.stdout.splitlines()
    view = json.loads(line)
    assert (view["iteration"], view["phase"], view["notice"]) == (0, "rollout", "")
    assert (view["totals"]["responses_done"], view["totals"]["tokens"]) == (1, 3)
    assert [member["state"] for member in view["members"]] == ["working", "not come"]
    assert view["members"][0]["heartbeat_age_s"] is None
    assert view["waits_for"][0]["unfinished"] == [
        {"response": 1, "tokens": 0, "holder": "00000-abcd", "released": False}
    ]


def test_once_is_plain_text_where_there_is_no_terminal(url):
    result = watch(url, "--once")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "responses 1 of 4   groups 0 of 2   tokens 3" in result.stdout
    assert "not yet seen to change" in result.stdout


@pytest.mark.slow
def test_a_whole_run_from_plan_to_commit(tmp_path):
    run = str(tmp_path / "run")
    model = model_directory(tmp_path / "model")
    phases = []

    def look():
        view = json.loads(watch(run, "--once", "--json").stdout)
        phases.append((view["iteration"], view["phase"]))
        return view

    plan_iteration(config(run, model))
    look()
    roll_out(run, 0)
    rolled_out = look()
    train_small(run, 0)
    trained = look()
    report = commit_iteration(run, 0)
    committed = look()
    plan_iteration(config(run, model))
    look()
    assert phases == [(0, "rollout"), (0, "training"), (0, "publishing"), (0, "committed"), (1, "rollout")]
    assert [member["state"] for member in rolled_out["members"]] == ["gone", "gone"]
    assert trained["totals"]["groups_recorded"] == 4
    assert {view["totals"]["tokens"] for view in (rolled_out, trained, committed)} == {report.metrics["num_tokens"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gcs://bucket/run"], "gleaner: storage URL: value 'gcs://bucket/run'; allowed: a path, file:///path"),
        (["memory://nothing-here", "--once"], "gleaner: memory://nothing-here holds no run"),
        (["memory://nothing-here", "--once", "--json"], "gleaner: memory://nothing-here holds no run"),
    ],
)
def test_what_cannot_be_watched_is_one_line(arguments, message):
    result = watch(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    [line] = result.stderr.splitlines()
    assert line.startswith(message)


def test_a_damaged_plan_is_one_line(url):
    connect(url).put(layout.plan(0), b"{")
    result = watch(url)
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("gleaner: object 'iterations/000000/plan.json' is corrupt: ")


def test_looks_follow_each_other_at_an_interval(url):
    assert watch(url, "--interval-s", "0").exit_code == 2


def follow(url, stdout, *arguments):
    command = [sys.executable, str(ROOT / "gleaner.py"), "watch", url, "--interval-s", "0.1", *arguments]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, cwd=ROOT)


def end(process):
    """Ctrl-C: the command's status, and what it had to say."""
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    return process.returncode, stderr.decode()


@pytest.mark.slow
def test_it_waits_for_a_run_goes_on_and_ends_on_ctrl_c(tmp_path):
    run = tmp_path / "run"
    process = follow(str(run), subprocess.PIPE, "--json")
    first = json.loads(process.stdout.readline())
    assert first["phase"] == "no run"
    assert not run.exists()
    begin(connect(str(run)))
    deadline_s = time.monotonic() + 300
    while json.loads(process.stdout.readline())["phase"] != "planning":
        assert time.monotonic() < deadline_s
    assert end(process) == (0, "")


@pytest.mark.slow
def test_it_serves_metrics_until_ctrl_c(url):
    process = follow(url, subprocess.DEVNULL, "--serve", "0")
    line = process.stderr.readline().decode()
    address = re.fullmatch(r"metrics at (http://127\.0\.0\.1:\d+/metrics) \(Ctrl-C ends\)\n", line)[1]
    with urllib.request.urlopen(address, timeout=300) as answer:
        text = answer.read().decode()
    assert f'gleaner_journalled_tokens{{run="{url}"}} 3\n' in text
    assert end(process) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "9464", "--once"], "gleaner: watch: allowed: [--json] [--once], --serve [HOST:]PORT, or --push"),
        (["--serve", "9464", "--json"], "gleaner: watch: allowed: "),
        (["--serve", "9464", "--push", "http://here"], "gleaner: watch: allowed: "),
        (["--serve", "here"], "gleaner: --serve: value 'here'; allowed: PORT (on 127.0.0.1) or HOST:PORT"),
        (["--push", "here"], "gleaner: --push: allowed: http://host:port"),
        (["--push", "http://127.0.0.1:1", "--once"], "gleaner: --push: http://127.0.0.1:1: "),
    ],
)
def test_metrics_that_cannot_be_given_are_one_line(url, arguments, message):
    result = watch(url, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    [line] = result.stderr.splitlines()
    assert line.startswith(message)


@pytest.mark.slow
def test_on_a_terminal_it_draws_in_place_and_ends_on_ctrl_c(url):
    terminal, its_end = pty.openpty()
    process = follow(url, its_end)
    os.close(its_end)
    shown, deadline_s = b"", time.monotonic() + 300
    while shown.count(b"responses 1 of 4") < 5 and time.monotonic() < deadline_s:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536)
    status = end(process)
    os.close(terminal)
    assert b"\x1b[1A" in shown  # one line up: the last look is drawn over
    assert status == (0, "")
