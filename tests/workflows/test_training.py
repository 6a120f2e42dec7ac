"""The whole thing, as a user runs it: `pyflyte run`, real processes, a real policy, a directory as the store."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from examples.compare import undisturbed_equals
from examples.warm_start import build_model, build_tokenizer
from storage import layout, records
from storage.connect import connect
from storage.records import AliveRecord
from storage.run import next_iteration, read_plan, reports
from storage.store import ObjectMissing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYFLYTE = [str(Path(sys.executable).parent / "pyflyte"), "--config", str(ROOT / "flyte.config"), "run"]
WORKFLOW = str(ROOT / "workflows" / "training.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    build_model(len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def config_file(tmp_path: Path, model: Path, url: str, **changes) -> Path:
    document = {
        "run": {"url": url, "seed": 3, "num_prompts_per_step": 8, "num_generations": 4, **changes},
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "size": 20},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": 150},
        "rollout": {
            "engine": "torch",
            "context_length": 240,
            "max_responses_in_flight": 4,
            "flush_interval_s": 0.1,
            "heartbeat_interval_s": 0.1,
        },
        "optimizer": {"learning_rate": 1e-4},
        "trainer": {"poll_interval_s": 0.05, "group_timeout_s": 60},
        "pools": {"rollout": {"count": 2, "interruptible": True}},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def pyflyte(config: Path, *more: str) -> "subprocess.Popen[str]":
    command = [*PYFLYTE, WORKFLOW, "training", "--config", str(config), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def kill_a_slot_in_the_middle(store, child) -> str:
    """SIGKILL the first process that has journalled something and is not done."""
    while child.poll() is None:
        for key in store.list(layout.alive_all(next_iteration(store))):
            try:
                alive = records.read(store, AliveRecord, key)
                store.get(layout.shard(next_iteration(store), alive.incarnation, 0), 0, 1)
            except ObjectMissing:
                continue
            if alive.state == "working":
                os.kill(alive.pid, signal.SIGKILL)
                return alive.incarnation
        time.sleep(0.01)
    raise AssertionError(f"no slot could be killed:\n{child.stdout.read()}")


def test_a_killed_run_continues_and_learns_from_the_same_tokens(tmp_path, model):
    url = str(tmp_path / "run")
    config = config_file(tmp_path, model, url)
    store = connect(url)
    child = pyflyte(config)
    victim = kill_a_slot_in_the_middle(store, child)
    output, _ = child.communicate(timeout=600)
    assert child.returncode == 0, output
    [first] = reports(store)
    assert victim in {life.incarnation for life in first.lives if life.state == "lost"}
    assert first.metrics["resume/tokens_recovered"] > 0
    assert undisturbed_equals(url, 0)[:2] == (32, 32)

    child = pyflyte(config)  # the same command again: the run goes on where it stands
    output, _ = child.communicate(timeout=600)
    assert child.returncode == 0, output
    second = reports(store)[1]
    assert (second.iteration, second.weight_version, second.next_prompt) == (1, 2, 16)
    assert "weights/00000002" in " ".join(store.list(layout.WEIGHTS))
    assert b"<svg" in store.get(layout.deck(1))

    before = {key: store.get(key) for key in store.list("")}
    child = pyflyte(config_file(tmp_path, model, url, seed=4))
    output, _ = child.communicate(timeout=600)
    assert child.returncode == 1
    assert "run.seed: 4 here, 3 there" in output.replace("\n", " ")
    assert {key: store.get(key) for key in store.list("")} == before


def test_with_staleness_the_next_iteration_is_sampled_from_older_weights_and_corrected(tmp_path, model):
    """The slots of iteration 2 begin when the weights they sample from, version 1, are not the newest any more."""
    url = str(tmp_path / "run")
    file = config_file(tmp_path, model, url, num_prompts_per_step=4)
    document = yaml.safe_load(file.read_text()) | {
        "algorithm": {"max_staleness": 1},
        "rewards": [{"function": "tests.reward_functions:even_length"}],
        "sampling": {"max_completion_length": 40},
        "retention": {"keep_weights": 9},
    }
    file.write_text(yaml.safe_dump(document))
    child = pyflyte(file, "--count", "3")
    output, _ = child.communicate(timeout=600)
    assert child.returncode == 0, output
    store = connect(url)
    history = reports(store)
    assert [read_plan(store, iteration).weight_version for iteration in range(3)] == [0, 0, 1]
    assert [report.weight_version for report in history] == [1, 2, 3]
    assert [report.next_prompt for report in history] == [4, 8, 12]
    assert [report.metrics["trajectory_staleness"] for report in history] == [0, 1, 1]
    assert all(0 < report.metrics["importance/ess"] <= 1 for report in history)
    spreads = [each.metrics["importance/ratio_max"] - each.metrics["importance/ratio_min"] for each in history]
    assert spreads[0] < 1e-4  # our own engine: the same policy, and nearly the same numbers
    assert min(spreads[1:]) > 1e-3
    for iteration in range(3):
        assert undisturbed_equals(url, iteration)[:2] == (16, 16)


def test_on_one_machine_pools_run_one_after_another_and_the_first_leaves_nothing_to_the_others(tmp_path, model):
    """Nor to the trainer, which would have generated, too."""
    url = str(tmp_path / "run")
    file = config_file(tmp_path, model, url)
    document = yaml.safe_load(file.read_text()) | {"planning": {"seeding": "auto"}}
    document["sampling"]["max_completion_length"] = 40
    document["pools"]["more_rollout"] = {"far": {"count": 1, "interruptible": False}}
    file.write_text(yaml.safe_dump(document))
    child = pyflyte(file)
    output, _ = child.communicate(timeout=600)
    assert child.returncode == 0, output
    store = connect(url)
    plan = read_plan(store, 0)
    assert [slot.pool for slot in plan.slots if slot.groups] == ["rollout", "rollout", "far", "train"]
    assert plan.seeding is not None
    [report] = reports(store)
    assert sorted((life.pool, life.slot, life.state) for life in report.lives) == [
        ("far", 2, "gone"),
        ("rollout", 0, "gone"),
        ("rollout", 1, "gone"),
    ]
    # One of the first pool may come so late that the other has done everything.
    assert {life.pool for life in report.lives if life.tokens_kept} == {"rollout"}
    assert report.metrics["seeding/tokens"] == 0
    assert undisturbed_equals(url, 0)[:2] == (32, 32)


def test_a_run_lives_in_an_s3_bucket_as_well(tmp_path, model, s3_url):
    url = f"{s3_url}/workflow"
    child = pyflyte(config_file(tmp_path, model, url))
    output, _ = child.communicate(timeout=600)
    assert child.returncode == 0, output
    [report] = reports(connect(url))
    assert report.metrics["num_tokens"] > 0
    assert undisturbed_equals(url, 0)[:2] == (32, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "it is empty; allowed: a mapping with sections run, policy"),
        (["--config", json.dumps({"run": {"url": "x", "sede": 1}})], "run.sede: unknown field; did you mean 'seed'?"),
    ],
)
def test_a_bad_configuration_is_refused_by_the_first_task(arguments, message, tmp_path):
    command = [*PYFLYTE, WORKFLOW, "training", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 1
    assert message in " ".join((done.stdout + done.stderr).replace("│", " ").split())
