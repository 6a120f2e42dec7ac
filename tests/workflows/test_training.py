"""The whole thing, as a user runs it: `pyflyte run`, real processes, a real policy, and a store."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import gleaner
from examples.compare import undisturbed_equals
from storage.records import layout
from storage.records.run import read_plan, reports
from storage.stores.connect import connect
from storage.weights.stored_versions import list_versions
from tasks.configuration.iteration_config import config_in_force
from tests.small_run import everything
from tests.whole_runs import (
    KILLABLE,
    ONE_SLOT,
    config_file,
    kill_a_slot_in_the_middle,
    run_here,
    train_here,
)

pytestmark = pytest.mark.slow

# For what is about members and stores: members need no model.
DEMO = "examples/demo.yaml"
WITHOUT_MODEL = {"engine": "scripted"}


def test_a_killed_run_continues_and_learns_from_the_same_tokens(tmp_path, model, monkeypatch):
    """Its first iteration is trained from Python, in a folder that is not the project's, as in a notebook.

    The second one gets its configuration as Flyte's console sends it, with all numbers as floats.
    """
    url = str(tmp_path / "run")
    own = {"function": "tests.reward_functions:beginning_with", "arguments": {"n": 3}, "on_failure": "stop"}
    sections = KILLABLE | {"pools": ONE_SLOT, "rewards": [{"function": "arithmetic"}, own]}
    config = config_file(tmp_path, model, url, **sections)
    store = connect(url)
    with monkeypatch.context() as elsewhere, ThreadPoolExecutor(1) as thread:
        elsewhere.chdir(tmp_path)
        training = thread.submit(gleaner.train, config.name)
        victim = kill_a_slot_in_the_middle(store, lambda: not training.done())
        training.result()
    [first] = reports(store)
    assert victim in {life.incarnation for life in first.lives if life.state == "lost"}
    assert first.metrics["resume/tokens_recovered"] > 0
    assert undisturbed_equals(url, 0)[:2] == (32, 32)

    with monkeypatch.context() as console:
        console.setenv("FLYTE_USE_OLD_DC_FORMAT", "true")
        train_here(config)  # the same command again: the run goes on where it stands
    second = reports(store)[1]
    assert config_in_force(store, read_plan(store, 1)) == config_in_force(store, read_plan(store, 0))
    assert (second.iteration, second.weight_version, second.next_prompt) == (1, 2, 16)
    assert "weights/00000002" in " ".join(store.list(layout.WEIGHTS))
    assert b"<svg" in store.get(layout.deck(1))

    before = everything(store)
    other = config_file(tmp_path, model, url, **sections, run={"seed": 4})
    assert "run.seed: 4 here, 3 there" in train_here(other, code=1)
    assert everything(store) == before


def test_with_staleness_the_next_iteration_is_sampled_from_older_weights_and_corrected(tmp_path, model):
    """The slot of iteration 2 begins when the weights that it samples from, version 1, are not the newest any more."""
    url = str(tmp_path / "run")
    file = config_file(
        tmp_path,
        model,
        url,
        run={"num_prompts_per_step": 4},
        algorithm={"max_staleness": 1},
        rewards=[{"function": "tests.reward_functions:even_length"}],
        retention={"keep_weights": 9},
        pools=ONE_SLOT,
    )
    train_here(file, "--count", "3")
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


def test_checkpoints_are_stored_at_the_end_of_each_execution_whatever_the_interval(tmp_path, model):
    """The second iteration of each replays the first; with staleness, its plan is written before that is trained."""
    url = str(tmp_path / "run")
    file = config_file(
        tmp_path,
        model,
        url,
        run={"num_prompts_per_step": 4},
        algorithm={"max_staleness": 1},
        rollout=WITHOUT_MODEL,
        rewards=[{"function": "tests.reward_functions:even_length"}],
        trainer={"checkpoint_interval": 9},
        retention={"keep_checkpoints": 9},
        pools=ONE_SLOT,
    )
    store = connect(url)
    for ends in ({2}, {2, 4}):
        train_here(file, "--count", "2")
        assert list_versions(store, layout.CHECKPOINTS).complete == ends
    history = [report.metrics for report in reports(store)]
    assert [metrics.get("replay/iterations", 0.0) for metrics in history] == [0.0, 1.0, 0.0, 1.0]
    assert [metrics.get("replay/tensors_changed", 0.0) for metrics in history] == [0.0] * 4
    assert all(0 < metrics["timing_s/replay"] < metrics["timing_s/train"] for metrics in history[1::2])


def test_on_one_machine_pools_run_one_after_another_and_the_first_leaves_nothing_to_the_others(tmp_path, model):
    """Nor to the trainer, which would have generated, too."""
    url = str(tmp_path / "run")
    pools = {"more_rollout": {"far": {"count": 1, "interruptible": False}}}
    file = config_file(tmp_path, model, url, rollout=WITHOUT_MODEL, planning={"seeding": "auto"}, pools=pools)
    train_here(file)
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
    train_here(config_file(tmp_path, model, url, rollout=WITHOUT_MODEL))
    [report] = reports(connect(url))
    assert report.metrics["num_tokens"] > 0
    assert undisturbed_equals(url, 0)[:2] == (32, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "it is empty; allowed: a mapping with sections run, policy"),
        (["--config", json.dumps({"run": {"url": "x", "sede": 1}})], "run.sede: unknown field; did you mean 'seed'?"),
        (["--config", json.dumps([DEMO, "run.sede=1"])], "run.sede: unknown field; did you mean 'seed'?"),
    ],
)
def test_a_bad_configuration_is_refused_before_anything_runs(arguments, message):
    output = run_here("training", *arguments, code=2)
    assert message in output
    assert "Traceback" not in output
