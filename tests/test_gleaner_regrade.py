"""The command `gleaner regrade`: what it prints, what it writes, and what it refuses in one line."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from gleaner import main
from resources.process import descendants
from storage.records import layout
from storage.records.gradings import gradings
from storage.stores.connect import connect
from tests.regraded_run import REWARDS, differences, holding, trained
from tests.small_run import document, everything, memory_store, model_directory

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
URL = "memory://regrade-command"
RUBRIC = [{"function": "format", "arguments": {"pattern": ".{130,}"}}, *REWARDS[-1:]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def objects(model):
    return trained("regrade-command", model, 2, rewards=REWARDS)


@pytest.fixture
def store(objects):
    return holding(objects, "regrade-command")


@pytest.fixture
def files(tmp_path, model):
    """The run's own configuration, and one with other rewards and another url."""
    for name, settings in {
        "own": document(URL, model, rewards=REWARDS),
        "rubric": document("memory://nowhere", model, rewards=RUBRIC),
    }.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def gleaner(*arguments):
    return CliRunner().invoke(main, ["regrade", *map(str, arguments)])


def refused(result):
    assert result.exit_code == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return line


def test_the_runs_own_rewards_change_nothing(store, files):
    before = everything(store)
    result = gleaner(files / "own.yaml")
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["characters", "counts_calls", "even", "format", "length", "third", "reward"]
    assert all(row[1] == row[2] and row[3] == "0 of 24" for row in rows)
    assert "grading own, iterations 0 to 1" in result.stdout
    assert "0 gain it, 0 lose it" in result.stdout
    assert "failed calls: " in result.stdout
    assert "graded 2 of 2 iterations now" in result.stdout
    assert list(differences(before, store, "own")) == []


def test_json_is_what_the_table_shows(store, files):
    first = gleaner(files / "rubric.yaml", "--run", URL, "--iterations", "1", "--json")
    assert (first.exit_code, first.stderr) == (0, "")
    told = json.loads(first.stdout)
    assert (told["grading"], told["iterations"], told["responses"]) == ("rubric", [1], 12)
    by_name = {each["name"]: each for each in told["functions"]}
    assert by_name["length"]["changed"] == 0
    assert by_name["length"]["correlation"] == pytest.approx(1.0)
    assert by_name["third"]["graded"] is None
    assert told["reward"]["changed"] > 6
    assert store.list(layout.GRADINGS) == [layout.graded("rubric", 1), layout.grading("rubric")]
    whole = gleaner(files / "rubric.yaml", "--run", URL, "--name", "rubric")
    assert "graded 1 of 2 iterations now; responses(n, grading='rubric') reads them" in whole.stdout
    again = everything(store)
    assert "graded 0 of 2 iterations now" in gleaner(files / "rubric.yaml", "--run", URL).stdout
    assert everything(store) == again


def test_what_cannot_be_graded_is_one_line(store, files):
    before = everything(store)
    name = "up to 100 letters, digits, '.', '_' and '-', the first no '.' and no '-'"
    cases = [
        ("--iterations", "7", "iterations: value '7'; allowed: the run has 0 to 1"),
        ("--iterations", "2:1", "iterations: value '2:1'; allowed: the run has 0 to 1"),
        ("--iterations", "-1", "iterations: value '-1'; allowed: a:b (without b), a:, :b or a, counted from 0"),
        ("--name", "../own", f"name: value '../own'; allowed: {name}"),
        ("--run", "memory://empty", "memory://empty holds no run"),
    ]
    memory_store("empty")
    for option, value, line in cases:
        assert refused(gleaner(files / "own.yaml", option, value)) == f"gleaner: {line}"
    assert everything(store) == before


def test_a_name_of_other_rewards_is_one_line(store, files):
    assert gleaner(files / "own.yaml", "--name", "mine").exit_code == 0
    before = everything(store)
    line = refused(gleaner(files / "rubric.yaml", "--run", URL, "--name", "mine"))
    assert line.startswith("gleaner: name: value 'mine', whose rewards are others (")
    assert line.endswith("; allowed: those, or another name")
    assert everything(store) == before
    assert gradings(connect(URL)) == ["mine"]


def test_a_file_whose_name_is_no_name_of_a_grading_asks_for_another(store, files):
    strange = (files / "own.yaml").rename(files / "my rewards.yaml")
    assert refused(gleaner(strange)).startswith("gleaner: name: value 'my rewards'; allowed: ")
    assert gleaner(strange, "--name", "my-rewards", "--iterations", "0").exit_code == 0
    assert gradings(store) == ["my-rewards"]


def test_a_run_without_a_committed_iteration_has_nothing_to_grade(objects, files):
    begun = {key: body for key, body in objects.items() if not key.endswith("report.json")}
    store = holding(begun, "regrade-command")
    assert refused(gleaner(files / "own.yaml")) == (
        f"gleaner: {URL} holds no committed iteration; allowed: a run with one"
    )
    assert everything(store) == begun


def test_a_killed_command_goes_on_where_it_stood(objects, files, tmp_path, model):
    url, notes = str(tmp_path / "run"), tmp_path / "notes"
    store = connect(url)
    for key, body in objects.items():
        store.put(key, body)
    first, second = (len(store.list(layout.batches(iteration))) for iteration in (0, 1))
    reward = {"function": "tests.reward_functions:stopping_at", "arguments": {"file": str(notes), "call": first}}
    config = files / "stopping.yaml"
    config.write_text(yaml.safe_dump(document(url, model, rewards=[reward | {"time_limit_s": 600.0}])))
    command = [sys.executable, "-m", "gleaner", "regrade", str(config)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as child:
        try:
            while not notes.exists() or notes.read_text().count("\n") <= first:
                assert child.poll() is None
                time.sleep(0.02)
            of_reward = descendants(child.pid)
        finally:
            child.kill()
    assert store.list(layout.GRADINGS) == [layout.graded("stopping", 0), layout.grading("stopping")]
    done = store.get(layout.graded("stopping", 0))
    (tmp_path / "notes.go").touch()
    assert "graded 1 of 2 iterations now" in gleaner(config).stdout
    assert notes.read_text().count("\n") == first + 1 + second
    assert store.get(layout.graded("stopping", 0)) == done
    assert of_reward
    assert not any(is_alive(pid) for pid in of_reward)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
