"""The log of a pod, as its container writes it: what is done, for whom, how far it is; and nothing of level ERROR."""

import ast
import functools
import re
from pathlib import Path

import pytest

from storage.records import layout
from storage.records.run import exists
from storage.stores.connect import connect
from tasks.collect import collect
from tasks.conclude import conclude
from tasks.configuration.references import PlanReference, TrainOutcome
from tasks.configuration.run_config import dump, parse, settings_digest
from tasks.local_map import crew_map
from tasks.plan import plan
from tasks.rollout import rollout
from tasks.train import train
from tests.processes import LIMIT_S, container, container_of
from tests.small_run import document, model_directory, plan_iteration
from workflows.training import iterations

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC (?P<said>run .*)")
GRANTED = re.compile(r"(?<=: begins), granted [^,]+, [^,]+, \d+ GPUs$")
# Where the body of a task is a function of another file.
ELSEWHERE = {"stand": "attempt(", "train_elastic": "trained("}


def log_of(task, inputs, folder, files):
    """What a container wrote, line by line, without the times; it ended well."""
    with container_of(task, inputs, folder, files, FLYTE_K8S_ARRAY_INDEX="0") as process:
        assert process.wait(LIMIT_S) == 0, (folder / "log").read_text()
    text = (folder / "log").read_text()
    assert "error.pb" not in " ".join(connect(files).list("out/"))
    # flytekit begins with an empty line.
    found = [LINE.fullmatch(line) for line in text.splitlines() if line]
    assert all(found), text
    return [GRANTED.sub("", each["said"]) for each in found]


@pytest.mark.slow
def test_the_log_of_every_pod_of_an_iteration_says_what_is_done_and_holds_no_error(tmp_path, s3_url, monkeypatch):
    monkeypatch.setenv("BATCH_JOB_ARRAY_INDEX_VAR_NAME", "FLYTE_K8S_ARRAY_INDEX")
    url = f"{s3_url}/pod-logs"
    pools = {"rollout": {"count": 1, "interruptible": True}}
    config = dump(parse(document(url, model_directory(tmp_path / "model"), pools=pools)))

    def log(what, task, **inputs):
        return log_of(task, inputs, tmp_path / what, f"{s3_url}/flyte/{what}")

    wired = log("iterations", iterations, config=config, count=1, code="")
    settings = f"settings {settings_digest(parse(config))}, version unknown"
    assert wired[0] == f"run {url}, wiring 1 iterations with {settings}: begins"
    assert wired[-1].startswith(f"run {url}, wiring 1 iterations with {settings}: ends, after ")

    planned = log("plan", plan, config=config, after=-1, ahead=0, pools=["rollout"], last=False)
    begins, *phases, ends = [line.removeprefix(f"run {url}, plan of the next iteration, plan: ") for line in planned]
    assert begins == "begins"
    assert {"opening the run, and taking its lease", "planning"} <= set(phases)
    assert ends.startswith("iteration 0 is planned for 1 slots, after ")

    reference = PlanReference(run_url=url, iteration=0, weight_version=0, execution="plan")
    crew = crew_map(functools.partial(rollout, plan=reference))
    rolled = log("plan-of-rollout", crew, slot=[0], plan=reference)
    place = f"run {url}, iteration 0"
    assert rolled[:2] == [f"{place}, slot 0, rollout: begins", f"{place}, slot 0, rollout: starting the engine"]
    assert rolled[2].startswith(f"{place}, slot 0, rollout: generating for iteration 0 as 00000-")
    assert re.search(r"rollout: ends: 12 responses ended, \d+ tokens generated, after \d+ s$", rolled[-1])

    trained = log("train", train, plan=reference)
    assert trained[0] == f"{place}, train: begins"
    assert f"{place}, train: restoring the state of weight version 0" in trained
    assert any("train: recording groups as they end: 0 micro-batches recorded; " in line for line in trained)
    assert f"{place}, train: publishing weight version 1" in trained
    assert trained[-1].startswith(f"{place}, train: trained to weight version 1, reward ")

    outcome = TrainOutcome(plan=reference, weight_version=1, reward=0.0)
    concluded = log("conclude", conclude, trained=outcome, last=True)
    assert concluded[0] == f"{place}, conclude: begins"
    assert re.search(r"conclude: committed: reward \S+, [\d,]+ tokens, [\d.]+ s, [\d.]+ \$$", concluded[-2])
    assert concluded[-1].startswith(f"{place}, conclude: ends, after ")
    assert exists(connect(url), layout.report(0))


@pytest.mark.slow
def test_what_is_waited_for_is_said_and_a_failure_is_the_last_line(tmp_path):
    """No member comes; the follower's limit is over before a line could be said again."""
    url = str(tmp_path / "run")
    settings = parse(document(url, model_directory(tmp_path / "model"), trainer={"group_timeout_s": 0.05}))
    reference = plan_iteration(settings)
    with container(collect, reference, tmp_path / "container") as process:
        process.wait(LIMIT_S)
    said = [
        found["said"]
        for found in map(LINE.fullmatch, (tmp_path / "container" / "log").read_text().splitlines())
        if found
    ]
    place = f"run {url}, iteration 0, collect"
    waits = "0 of 12 responses have ended, with 0 tokens; waits for 4 groups"
    assert f"{place}: recording groups as they end: 0 micro-batches recorded; {waits}" in said
    assert said[-1].startswith(f"{place}: failed: GroupTimeout: iteration 0: nothing was journalled")


def test_every_task_says_what_it_does():
    """A task is a function that Flyte's decorator declares."""
    silent = []
    for file in sorted((ROOT / "tasks").glob("*.py")):
        text = file.read_text()
        decorators = [
            ast.unparse(each)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef)
            for each in node.decorator_list
        ]
        count = sum(each.startswith("task(") for each in decorators)
        says = text.count(ELSEWHERE.get(file.stem, " logged_task("))
        if says < count:
            silent.append(file.name)
    assert silent == []
