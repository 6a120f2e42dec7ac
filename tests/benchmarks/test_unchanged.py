"""What the comparison of two commits finds: nothing in equal code, and a planted difference."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest

from benchmarks.code_tree import Session, copy_commit, copy_working_tree, processor_s
from benchmarks.recorded_run import Recorded, differences, read_recorded
from benchmarks.unchanged import AGAINST, NOW, START, Comparison, report
from tests.processes import are_gone, wait_until
from tests.small_run import (
    commit_iteration,
    config,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

FACTS = {"tokens": {"0/0": (b"\1", 1), "0/1": (b"\2", 1)}, "rewards": {"0/0": 0.5}, "metrics": {"0/loss": float("nan")}}
RUN = Recorded(FACTS, frozenset({"run.json"}), frozenset({"run.json: a"}), 10.0, 100)


def summary_of(capsys, tmp_path, before, after, took_s=(10.0, 10.0)):
    """The JSON of a comparison of one round."""
    comparison = Comparison({}, tmp_path, ["own"], 1)
    comparison.recorded = {"own": {AGAINST: [before], NOW: [after]}}
    comparison.took_s = {
        "own": {AGAINST: [took_s[0]], NOW: [took_s[1]]},
        START: {AGAINST: [5.0], NOW: [5.0]},
    }
    report(comparison, {}, as_json=True)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def missed(summary):
    return {name for name, target in summary["targets"].items() if not target["met"]}


def with_facts(**aspects):
    return dataclasses.replace(RUN, facts=FACTS | aspects)


def test_equal_runs_miss_nothing(capsys, tmp_path):
    assert missed(summary_of(capsys, tmp_path, RUN, with_facts())) == set()


@pytest.mark.parametrize(
    ("after", "aspect", "place"),
    [
        (with_facts(tokens={"0/0": (b"\1", 1), "0/1": (b"\3", 1)}), "tokens", "0/1"),
        (with_facts(tokens={"0/0": (b"\1", 1)}), "tokens", "0/1"),
        (with_facts(rewards=FACTS["rewards"] | {"0/1": 0.0}), "rewards", "0/1"),
        (with_facts(rewards={"0/0": 0.5000000000000001}), "rewards", "0/0"),
        (with_facts(metrics={}), "metrics", "0/loss"),
    ],
)
def test_each_other_fact_is_found_by_place(capsys, tmp_path, after, aspect, place):
    summary = summary_of(capsys, tmp_path, RUN, after)
    assert missed(summary) == {"own_facts_that_differ"}
    assert summary["placements"]["own"]["differ"] == {aspect: [place]}


def test_a_metric_and_a_field_may_be_new_and_an_object_may_not(capsys, tmp_path):
    after = dataclasses.replace(
        with_facts(metrics=FACTS["metrics"] | {"0/more": 1.0}), fields=frozenset({"run.json: a", "run.json: b"})
    )
    summary = summary_of(capsys, tmp_path, RUN, after)
    assert missed(summary) == set()
    assert summary["placements"]["own"]["fields_new"] == ["run.json: b"]
    more = dataclasses.replace(after, objects=frozenset({"run.json", "external/beat.json"}))
    assert missed(summary_of(capsys, tmp_path, RUN, more)) == {"own_kinds_of_objects_that_differ"}
    assert missed(summary_of(capsys, tmp_path, after, RUN)) == {"own_facts_that_differ", "own_fields_gone"}


def test_more_than_a_tenth_more_processor_time_is_missed(capsys, tmp_path):
    assert missed(summary_of(capsys, tmp_path, RUN, RUN, (10.0, 11.4))) == set()
    assert missed(summary_of(capsys, tmp_path, RUN, RUN, (10.0, 11.6))) == {"processor_time_ratio"}


def test_an_unknown_commit_is_one_line(tmp_path):
    with pytest.raises(LookupError, match="--against: value 'no-such-commit'; allowed: a commit"):
        copy_commit("no-such-commit", tmp_path)


def test_processor_time_has_that_of_ended_and_running_descendants():
    burns = "import sys, time\nwhile time.process_time() < 0.3: pass\n"
    before_s = processor_s()
    subprocess.run([sys.executable, "-c", burns], check=True)
    ended_s = processor_s()
    waits = f"{burns}print(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        running_s = processor_s()
    # The kernel tells in hundredths of a second.
    assert 0.28 <= ended_s - before_s < 3.0
    assert 0.28 <= running_s - ended_s < 3.0


# What stands for the workflow: it leaves a process behind.
WORKFLOW = {
    "training": "import subprocess\n"
    "def training(config, count):\n    print(subprocess.Popen(['sleep', '600']).pid, file=open(config, 'w'))\n",
    "config_input": "Configuration = lambda given: given['file']",
    "count": "Count = int",
}


@pytest.mark.slow
def test_a_session_that_is_interrupted_leaves_no_process_behind(tmp_path):
    folder = tmp_path / "tree" / "workflows"
    folder.mkdir(parents=True)
    for name, text in WORKFLOW.items():
        (folder / f"{name}.py").write_text(text)
    document = {"trainer": {}, "run": {"url": "url"}, "file": str(tmp_path / "pid")}
    session = Session(tmp_path / "tree", tmp_path / "log")

    def interrupted():
        with session:
            session.train(document, 1)
            assert not are_gone([int((tmp_path / "pid").read_text())])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert session._child.returncode is not None
    # A killed process takes a moment to end.
    wait_until(lambda: are_gone([int((tmp_path / "pid").read_text())]))


@pytest.mark.slow
def test_two_runs_are_read_to_the_bit(tmp_path):
    """A rate that is a thousandth higher shows in weights, optimizer and its own metric, and in nothing else."""
    model, found = model_directory(tmp_path), {}
    for name, rate in (("first", 1e-3), ("again", 1e-3), ("higher", 1.001e-3)):
        memory_store(name)
        settings = config(f"memory://{name}", model, optimizer={"learning_rate": rate})
        plan_iteration(settings)
        roll_out(f"memory://{name}", 0)
        train_small(f"memory://{name}", 0)
        commit_iteration(f"memory://{name}", 0)
        found[name] = read_recorded(f"memory://{name}", 1)
    with pytest.raises(LookupError, match="1 iterations are committed; expected 2"):
        read_recorded("memory://first", 2)
    assert all(found["first"].facts.values())
    assert {name for name, places in differences(found["first"], found["again"]).items() if places} == set()
    higher = differences(found["first"], found["higher"])
    assert {aspect for aspect, places in higher.items() if places} == {"weights", "optimizer", "metrics"}
    assert set(higher["metrics"]) - {"0/weights/bytes"} == {"0/actor/lr"}
    for each in found.values():
        assert (each.objects, each.fields) == (found["first"].objects, found["first"].fields)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_runs_of_equal_code_are_equal_but_for_a_planted_rate_that_is_a_thousandth_higher(tmp_path):
    same, planted = copy_working_tree(tmp_path / "same"), tmp_path / "planted"
    shutil.copytree(same, planted)
    optimizer = planted / "tasks" / "learning" / "optimizer.py"
    before = "return config.learning_rate\n"
    assert optimizer.read_text().count(before) == 1
    optimizer.write_text(optimizer.read_text().replace(before, "return config.learning_rate * 1.001\n"))
    comparison = Comparison({AGAINST: same, NOW: planted}, tmp_path, ["own"], 1)
    comparison.run(1)
    found = comparison.differing("own")
    assert {aspect for aspect, places in found.items() if places} == {"weights", "optimizer", "metrics"}
    assert set(found["metrics"]) - {"0/weights/bytes"} == {"0/actor/lr"}
    # Moments follow from gradients alone, the parameters do not.
    assert all("/parameter." in place for place in found["optimizer"])
    for what in ("objects", "fields"):
        assert comparison.gone_and_new("own", what) == ([], [])
    assert all(seconds > 1.0 for arms in comparison.took_s.values() for [seconds] in arms.values())
