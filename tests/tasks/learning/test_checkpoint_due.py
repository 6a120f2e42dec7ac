"""When a state is stored: at an interval, or by the time to write against the time to replay; with hindsight."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.records import layout, records
from storage.records.records import SettingsRecord, TrainingRecord
from storage.stores.memory import MemoryStore
from storage.weights.tensor_sets import WRITE_S, TensorBlock, publish
from tasks.configuration.run_config import ConfigError, parse
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.checkpoint_due import LOST_SHARE, is_checkpoint_due, is_worth_writing
from tests.journals import a_plan


def replay_s(phases_s, newest, iteration):
    """What the trainer of an iteration replays if the newest checkpoint is of this version."""
    return sum(phases_s[newest:iteration])


def taken_s(phases_s, write_s, rule):
    """Seconds of writing and replaying, where trainers keep nothing; rule: of the phases since, and the version."""
    newest, total_s = 0, 0.0
    for version in range(1, len(phases_s) + 1):
        total_s += replay_s(phases_s, newest, version - 1)
        if rule(phases_s[newest:version], version):
            newest, total_s = version, total_s + write_s
    return total_s + replay_s(phases_s, newest, len(phases_s))


def with_hindsight_s(phases_s, write_s):
    """The least that any choice of versions takes."""
    versions = len(phases_s)
    least = [0.0] * (versions + 1)  # from a checkpoint of this version to the end, what is replayed last included
    for newest in range(versions, -1, -1):
        replayed = [replay_s(phases_s, newest, iteration) for iteration in range(newest + 1, versions + 1)]
        least[newest] = sum(replayed)
        for version in range(newest + 1, versions + 1):
            before = sum(replayed[: version - newest - 1])
            least[newest] = min(least[newest], before + write_s + least[version])
    return least[0]


PHASES = st.lists(st.floats(0.1, 50.0), min_size=1, max_size=14)


@given(PHASES, st.floats(0.1, 400.0))
def test_hindsight_saves_at_most_half_of_the_time_and_writing_each_is_never_faster(phases_s, write_s):
    found = taken_s(phases_s, write_s, lambda since, _: is_worth_writing(since, write_s))
    # What is replayed since the last checkpoint, at the end, is less than one writing.
    assert found <= 2 * with_hindsight_s(phases_s, write_s) + write_s + 1e-6
    assert found <= len(phases_s) * write_s + 1e-6 or len(phases_s) == 1


@pytest.mark.parametrize("write_s", [0.5, 1.0, 3.0, 7.5, 20.0, 60.0])
def test_with_equal_phases_it_is_nearly_as_good_as_the_best_interval(write_s):
    phases_s = [1.0] * 240
    found = taken_s(phases_s, write_s, lambda since, _: is_worth_writing(since, write_s))
    fixed = min(taken_s(phases_s, write_s, lambda _, version, k=k: version % k == 0) for k in range(1, 41))
    assert found <= 1.05 * fixed


def test_a_state_that_is_seldom_lost_is_seldom_written():
    assert is_worth_writing([1.0], 1.0)
    assert not is_worth_writing([1.0], 1.1)
    assert is_worth_writing([1.0, 1.0], 3.0)
    assert not is_worth_writing([1.0] * 5, 1.0, 0.05)
    assert is_worth_writing([1.0] * 6, 1.0, 0.05)


def stored(phases_s, write_s):
    """A run with a checkpoint of version 1, and the records of the iterations after it."""
    store = MemoryStore()
    metadata = {} if write_s is None else {WRITE_S: write_s}
    publish(store, layout.checkpoint(1), {"parameter.w": TensorBlock("F32", (1,), bytes(4))}, metadata)
    for iteration, seconds in enumerate((1.0, *phases_s)):
        record = TrainingRecord(
            iteration=iteration,
            weight_version=iteration + 1,
            metrics={"timing_s/compute": seconds},
            reward_errors=(),
            started_at_s=0.0,
            ended_at_s=0.0,
        )
        records.commit(store, layout.training(iteration), record)
    return store


def is_due(store, iteration, **trainer):
    plan = a_plan(1, 1, iteration=iteration)
    return is_checkpoint_due(store, plan, TrainerConfig(**trainer))


def test_auto_weighs_what_the_last_checkpoint_and_the_records_since_have_measured():
    assert is_due(MemoryStore(), 0, checkpoint_interval="auto")
    assert is_due(stored([9.0], None), 1, checkpoint_interval="auto")
    for phases_s, write_s, due in (([9.0], 9.0, True), ([9.0], 9.5, False), ([4.0, 2.0], 10.0, True)):
        assert is_due(stored(phases_s, write_s), len(phases_s), checkpoint_interval="auto") == due
    assert not is_due(stored([4.0, 2.0], 10.5), 2, checkpoint_interval="auto")
    shared = {"placement": "shared", "fleet": "/fleet", "checkpoint_interval": "auto"}
    assert not is_due(stored([9.0], 9.0), 1, **shared)
    assert is_due(stored([9.0], 9.0 * LOST_SHARE), 1, **shared)


@pytest.mark.parametrize("value", [0, -1, "never", "5", 1.5, True, None])
def test_another_value_is_refused_in_one_line(value):
    with pytest.raises(ConfigError) as caught:
        parse({"trainer": {"checkpoint_interval": value}})
    lines = [line for line in str(caught.value).splitlines() if "checkpoint_interval" in line]
    assert lines == [
        f"  trainer.checkpoint_interval: {json.dumps(value)} given; allowed: an integer of at least 1, or auto"
    ]


def test_an_interval_and_the_end_of_an_execution_ask_for_nothing_measured():
    store = MemoryStore()
    assert [is_due(store, iteration, checkpoint_interval=3) for iteration in range(4)] == [False, False, True, False]
    records.put(store, layout.settings(3), SettingsRecord(config={}, execution="e", ends_execution=True))
    for interval in (3, "auto"):
        assert is_due(store, 3, checkpoint_interval=interval)
