"""What broke is the first thing that is told of a run, on each of its screens, until the task succeeds."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from flytekit.exceptions.user import FlyteRecoverableException

import tasks.concluding.iteration as concluding
from gleaner import main
from storage.clock import SystemClock
from storage.process_identity import has_ended, process_name, process_space
from storage.records import layout
from storage.records.failures import forget_slots, last_failures
from storage.records.run import AnotherRun, RunBusy, acquire_lease, release_lease
from storage.stores.store import StoreUnavailable
from tasks.collect import collect
from tasks.conclude import conclude
from tasks.configuration.references import TrainOutcome
from tasks.configuration.run_config import dump
from tasks.learning import collecting, launch
from tasks.plan import plan
from tasks.preparing import iteration as preparing
from tasks.reporting.run_metrics import RunMetrics
from tasks.reporting.watch import Watcher
from tasks.train import train
from tasks.viewing.page_file import render_page
from tasks.viewing.run_summary import summary
from tests.kept_failures import keep_slot
from tests.small_run import config, memory_store, plan_iteration, roll_out, train_small
from tests.watched_run import planned

URL = "memory://what-broke"


@pytest.fixture
def run(model):
    """(store, configuration, reference) of a run whose first iteration waits for its trainer."""
    store = memory_store("what-broke")
    settings = config(URL, model)
    reference = plan_iteration(settings)
    roll_out(URL, 0)
    return store, settings, reference


def said(*arguments):
    result = CliRunner().invoke(main, [*arguments, URL], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def screens(store):
    """(first line or value of each screen that tells of failures): all say the same."""
    line, *_ = said("status").splitlines()
    assert "".join(said("watch", "--once").split()).startswith("".join(line.split()))
    [as_json] = json.loads(said("status", "--json"))["failures"]
    [watched] = json.loads(said("watch", "--once", "--json"))["failures"]
    assert watched == as_json
    metrics = RunMetrics(store, SystemClock()).look().splitlines()
    assert metrics[0].startswith("# HELP gleaner_failure_time_seconds ")
    assert f'task="{as_json["task"]}",iteration="{as_json["iteration"]}"' in metrics[2]
    assert f"error={json.dumps(as_json['error'])}" in metrics[2]
    found = summary(store, 0.0)
    assert found["failures"] == [line]
    page = render_page(found)
    assert page.index('id="failures"') < page.index('id="facts"')
    return line, as_json


def quiet(store):
    assert not said("status").startswith(("failed", "ended"))
    assert not said("watch", "--once").startswith(("failed", "ended"))
    assert "failed" not in said("watch", "--once")
    assert json.loads(said("watch", "--once", "--json"))["failures"] == []
    assert "gleaner_failure" not in RunMetrics(store, SystemClock()).look()
    assert summary(store, 0.0)["failures"] == []


def breaks(error):
    def raises(*arguments, **named):
        raise error

    return raises


@pytest.mark.slow
def test_a_trainer_that_failed_is_told_first_until_it_has_trained(run, monkeypatch):
    store, _, reference = run
    quiet(store)
    monkeypatch.setattr(launch, "train_here", breaks(ValueError("the data\nis bad")))
    with pytest.raises(ValueError, match="is bad"):
        train(plan=reference)
    line, failure = screens(store)
    assert line.startswith("failed: train of iteration 0, ")
    assert line.endswith(": ValueError: the data is bad")
    assert (failure["slot"], failure["execution"]) == (None, reference.execution)
    monkeypatch.undo()
    train(plan=reference)
    quiet(store)


@pytest.mark.slow
def test_a_failure_for_which_flyte_tries_again_is_told_meanwhile(run, monkeypatch):
    store, _, reference = run
    monkeypatch.setattr(launch, "train_here", breaks(StoreUnavailable("no answer")))
    with pytest.raises(FlyteRecoverableException):
        train(plan=reference)
    assert screens(store)[1]["error"] == "StoreUnavailable: no answer"


@pytest.mark.slow
def test_a_collector_and_a_conclusion_that_failed_are_told_first(run, monkeypatch):
    store, _, reference = run
    monkeypatch.setattr(collecting, "collect", breaks(ValueError("no reward")))
    with pytest.raises(ValueError, match="no reward"):
        collect(plan=reference)
    assert screens(store)[0].startswith("failed: collect of iteration 0, ")
    monkeypatch.setattr(collecting, "collect", lambda *_: None)
    collect(plan=reference)
    quiet(store)
    train_small(URL, 0)
    after = TrainOutcome(plan=reference, weight_version=1, reward=0.0)
    with monkeypatch.context() as broken:
        broken.setattr(concluding, "commit_and_report", breaks(ValueError("it does not add up")))
        with pytest.raises(ValueError, match="add up"):
            conclude(trained=after, last=False)
    assert screens(store)[0].startswith("failed: conclude of iteration 0, ")
    conclude(trained=after, last=False)
    quiet(store)
    assert last_failures(store, 0) == []


@pytest.mark.slow
def test_a_plan_that_failed_is_told_first_and_a_second_command_is_no_failure(run, monkeypatch):
    store, settings, _ = run
    pools = {"config": dump(settings), "after": -1, "pools": ["rollout"]}
    with monkeypatch.context() as broken:
        broken.setattr(preparing, "prepare", breaks(RunBusy("another execution advances it")))
        with pytest.raises(RunBusy):
            plan(**pools)
        broken.setattr(preparing, "prepare", breaks(AnotherRun(URL, ["run.seed: 4 here, 3 there"])))
        with pytest.raises(AnotherRun):
            plan(**pools)
        quiet(store)
        broken.setattr(preparing, "prepare", breaks(ValueError("pools: too dear")))
        with pytest.raises(ValueError, match="too dear"):
            plan(**pools)
    line, failure = screens(store)
    assert line.startswith("failed: plan of iteration 1, ")
    assert failure["error"] == "ValueError: pools: too dear"


@pytest.mark.slow
def test_slots_that_failed_are_told_until_their_iteration_is_committed(run):
    store, _, reference = run
    keep_slot(store, 0, reference.execution, 1, "EngineError: no vLLM")
    assert screens(store)[0].startswith("failed: rollout of iteration 0, slot 1, ")
    train_small(URL, 0)
    conclude(trained=TrainOutcome(plan=reference, weight_version=1, reward=0.0), last=False)
    quiet(store)
    assert "an attempt of slot 1 failed, on m: EngineError: no vLLM" in store.get(layout.deck(0)).decode()


@pytest.mark.slow
def test_the_deck_begins_with_what_still_fails(run):
    store, _, reference = run
    train_small(URL, 0)
    from tasks.reporting.last_failures import TaskSubject, keep  # noqa: PLC0415

    keep(TaskSubject(task="evaluation", run_url=URL, iteration=0), ValueError(), "ValueError: <b>no</b> reward")
    conclude(trained=TrainOutcome(plan=reference, weight_version=1, reward=0.0), last=False)
    deck = store.get(layout.deck(0)).decode()
    told = deck.index("failed: evaluation of version 0, ")
    assert "ValueError: &lt;b&gt;no&lt;/b&gt; reward" in deck
    assert told < deck.index("<svg")
    assert replace(last_failures(store, 1)[0], at_s=0.0).task == "evaluation"


@pytest.mark.slow
def test_a_process_of_this_machine_that_was_killed_is_told_until_another_goes_on(run):
    store, _, reference = run
    watcher = Watcher(store, SystemClock())
    assert watcher.look().silent_end == ""
    release_lease(store, reference.execution)
    dead = f"here:x:4194305:{process_space()}-17"  # above the largest number of Linux
    acquire_lease(store, dead, 1.0, SystemClock())
    line, *_ = said("status").splitlines()
    assert line.startswith("ended without a word: process 4194305 of this machine, which advanced the run; ")
    assert "".join(said("watch", "--once").split()).startswith("".join(line.split()))
    assert summary(store, 0.0)["failures"] == [line]
    keep_slot(store, 0, reference.execution, 1, "EngineError: no vLLM")
    assert screens(store)[0].startswith("failed: rollout")
    assert Watcher(store, SystemClock()).look().silent_end == line
    acquire_lease(store, process_name(), 1.0, SystemClock(), has_ended)
    forget_slots(store, "another")
    quiet(store)
    store.put(layout.lease(9), b"damaged")
    quiet(store)


def test_a_watcher_asks_again_for_the_lease_where_its_holder_has_ended():
    store = planned()
    dead = f"here:x:4194305:{process_space()}-17"
    acquire_lease(store, dead, 1.0, SystemClock())
    watcher = Watcher(store, SystemClock())
    assert watcher.look().silent_end == watcher.look().silent_end != ""
    acquire_lease(store, process_name(), 1.0, SystemClock(), has_ended)
    assert watcher.look().silent_end == ""


@pytest.mark.slow
def test_damaged_records_of_failures_disturb_no_screen(run):
    store, _, reference = run
    for key in (layout.failure("train"), layout.failure("plan"), f"{layout.FAILURES}rollout/x", f"{layout.FAILURES}x"):
        store.put(key, b"\x00damaged")
    quiet(store)
    train(plan=reference)
    conclude(trained=TrainOutcome(plan=reference, weight_version=1, reward=0.0), last=True)
    quiet(store)
