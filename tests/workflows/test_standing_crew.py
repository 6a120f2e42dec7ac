"""A standing crew as a user runs it: `pyflyte run`, and members that are processes for all iterations."""

import pytest

from examples.compare import undisturbed_equals
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord, ended_slots
from storage.records.records import SettingsRecord
from storage.records.run import read_plan, reports
from storage.stores.connect import connect
from tests.whole_runs import KILLABLE, config_file, ended, kill_a_slot_in_the_middle, pyflyte, train_here

pytestmark = pytest.mark.slow
STANDING = KILLABLE | {"rollout": KILLABLE["rollout"] | {"crew": "standing"}}


def beats(store, iteration):
    return [records.read(store, HeartbeatRecord, key) for key in store.list(layout.alive_all(iteration))]


def test_with_staleness_killed_members_come_again_and_the_tokens_are_the_same(tmp_path, model):
    url = str(tmp_path / "run")
    retention = {"keep_weights": 9, "compact": False}
    config = config_file(tmp_path, model, url, **STANDING | {"algorithm": {"max_staleness": 2}, "retention": retention})
    store = connect(url)
    child = pyflyte("training", "--config", str(config), "--count", "4")
    victim = kill_a_slot_in_the_middle(store, lambda: child.poll() is None)
    ended(child)
    history = reports(store)
    assert [report.weight_version for report in history] == [1, 2, 3, 4]
    assert [read_plan(store, iteration).weight_version for iteration in range(4)] == [0, 0, 0, 1]
    lives = [life for report in history for life in report.lives]
    assert victim in {life.incarnation for life in lives if life.state == "lost"}
    for iteration in range(4):
        assert undisturbed_equals(url, iteration)[:2] == (32, 32)


def test_a_member_is_one_process_for_all_iterations_and_its_end_is_noted_behind_the_last(tmp_path, model):
    url = str(tmp_path / "run")
    retention = {"keep_weights": 9, "compact": False}
    train_here(config_file(tmp_path, model, url, **STANDING | {"retention": retention}), "--count", "3")
    store = connect(url)
    assert len(reports(store)) == 3
    processes = [{each.slot: each.pid for each in beats(store, iteration)} for iteration in range(3)]
    # A member that was slow may find an iteration complete.
    seen = {pair for each in processes for pair in each.items()}
    assert all(processes)
    assert len(seen) == len({pid for _, pid in seen}) == 2
    execution = records.read(store, SettingsRecord, layout.settings(2)).execution
    assert ended_slots(store, 0, execution) == ended_slots(store, 1, execution) == set()
