"""`pyflyte run` whole, with real processes, where slots of the crew fail for good or never start."""

import os
import time

import pytest

from examples.compare import undisturbed_equals
from resources.local_starter import running_starter
from storage.records import layout, records
from storage.records.failures import slot_failures
from storage.records.records import SettingsRecord
from storage.records.run import read_plan, reports
from storage.stores.connect import connect
from tests.planning_requests import seeding_constants
from tests.whole_runs import ROOT, config_file, train_here

pytestmark = pytest.mark.slow

# The starter imports this. Its hook is called for every file that an element opens: the elements with these numbers die
# when they open their script.
DYING = """
import os, signal, sys
def die(event, _):
    number = os.environ.get("FLYTE_K8S_ARRAY_INDEX")
    if event == "open" and number in os.environ.get("SLOTS_THAT_DIE", "").split(","):
        os.kill(os.getpid(), signal.SIGKILL)
os.register_at_fork(after_in_child=lambda: sys.addaudithook(die))
"""
# An hour is waited where the end is not noticed.
WAITS_MAX_S = 900.0


@pytest.fixture(scope="module", autouse=True)
def slots_can_die(tmp_path_factory):
    """A starter of its own for these tests."""
    folder = tmp_path_factory.mktemp("dying")
    (folder / "sitecustomize.py").write_text(DYING)
    running_starter(os.environ).close()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(folder))
        starter = running_starter(os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])})
        yield
    starter.close()


@pytest.fixture(scope="module")
def half_absent(tmp_path_factory, model):
    """(url, output) of a run of one iteration in which each process of slot 1 dies."""
    folder = tmp_path_factory.mktemp("half_absent")
    url = str(folder / "run")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLOTS_THAT_DIE", "1")
        return url, train_here(config_file(folder, model, url))


def test_a_slot_that_is_killed_at_every_attempt_leaves_its_responses_to_the_other(half_absent):
    url, output = half_absent
    assert "no attempts left; last: exit code -9" in output
    [report] = reports(connect(url))
    assert {life.slot for life in report.lives if life.tokens_kept} == {0}
    assert undisturbed_equals(url, 0)[:2] == (32, 32)


def test_where_every_slot_fails_the_run_ends_soon_and_says_why(tmp_path, model):
    """Not after group_timeout_s, which is an hour: an image without the engine is known at once."""
    url = str(tmp_path / "run")
    output = train_here(config_file(tmp_path, model, url, rollout={"engine": "vllm"}), code=1)
    ended_at_s = time.time()
    store = connect(url)
    execution = records.read(store, SettingsRecord, layout.settings(0)).execution
    told = [*slot_failures(store, 0, execution).values()]
    assert [failure.slot for failure in told] == [0, 1]
    assert ended_at_s - max(failure.at_s for failure in told) < WAITS_MAX_S
    assert "no process can generate the missing responses" in output
    for failure in told:
        assert "vLLM" in failure.error
        assert f"slot {failure.slot}: {failure.error[:40]}" in output


def test_where_no_rollout_process_ever_starts_the_trainer_generates_and_learns_the_same(
    tmp_path, model, monkeypatch, half_absent
):
    monkeypatch.setenv("SLOTS_THAT_DIE", "0,1")
    alone = str(tmp_path / "run")
    planning = {"seeding": "auto"}
    with seeding_constants(0.0, 0.0):
        train_here(config_file(tmp_path, model, alone, planning=planning))
    assert not read_plan(connect(alone), 0).slots[-1].groups or read_plan(connect(alone), 0).slots[-1].pool != "train"
    [with_crew], [without] = reports(connect(half_absent[0])), reports(connect(alone))
    assert {life.pool for life in without.lives} == {"train"}
    assert without.rewards == with_crew.rewards
    assert without.lengths == with_crew.lengths
    assert without.metrics["seeding/tokens"] == without.metrics["num_tokens"]
    assert undisturbed_equals(alone, 0)[:2] == (32, 32)
