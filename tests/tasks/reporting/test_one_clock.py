"""Machines whose clocks are off by an hour, and what a report says of their times."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import PlanRecord, TrainingRecord
from tasks.reporting.conclusion import conclude_iteration
from tests.tasks.reporting.test_conclusion import PRICES, an_iteration, conclude

HOUR_S = 3600.0
NAMES = ("00000-a", "00000-b", "00001-c")


def with_clocks(off_s, hosts=("one", "one", "two")):
    """The hand-made iteration, in which the clock of each host is off by this many seconds."""
    store = an_iteration()
    for name, host in zip(NAMES, hosts, strict=True):
        key = layout.alive(0, name)
        told = records.read(store, HeartbeatRecord, key)
        by_s = off_s.get(host, 0.0)
        changed = {
            field: value + by_s
            for field in ("started_at_s", "updated_at_s", "working_at_s")
            if (value := getattr(told, field)) is not None
        }
        records.put(store, key, replace(told, host=host, **changed))
    return store


@pytest.mark.parametrize("off_s", [HOUR_S, -HOUR_S])
@pytest.mark.parametrize("hosts", [("one",), ("two",), ("one", "two")])
def test_a_clock_that_is_off_by_an_hour_makes_no_hour(off_s, hosts, caplog):
    right = conclude(an_iteration())
    report = conclude(with_clocks(dict.fromkeys(hosts, off_s)))
    assert report.metrics["timing_s/rollout"] == pytest.approx(right.metrics["timing_s/rollout"], abs=15)
    for name in ("timing_s/rollout_machines", "cost/usd_rollout", "cost/usd_iter", "timing_s/train"):
        assert report.metrics[name] == pytest.approx(right.metrics[name])
    assert report.pools[0].members == pytest.approx(right.pools[0].members, rel=0.3)
    assert all(1000 <= life.started_at_s <= life.ended_at_s <= 1100 for life in report.lives)
    assert "the clock of one is wrong" in caplog.text or "the clock of two is wrong" in caplog.text


def test_a_clock_that_was_set_while_a_member_lived_makes_no_hour_either():
    report = conclude(with_clocks({"b": HOUR_S}, hosts=("a", "b", "a")))
    assert report.metrics["timing_s/rollout"] <= 100


@pytest.mark.parametrize("off_s", [HOUR_S, -HOUR_S])
@pytest.mark.parametrize("field", ["started_at_s", "working_at_s"])
def test_a_clock_that_was_set_within_a_life_gives_no_negative_duration(field, off_s):
    store = an_iteration()
    key = layout.alive(0, NAMES[0])
    told = records.read(store, HeartbeatRecord, key)
    began = replace(told, working_at_s=told.started_at_s + 1)
    records.put(store, key, replace(began, **{field: getattr(began, field) + off_s}))
    report = conclude(store)
    for life in report.lives:
        working_at_s = life.started_at_s if life.working_at_s is None else life.working_at_s
        assert life.started_at_s <= working_at_s <= life.ended_at_s
    assert all(pool.machine_s >= 0 and (pool.start_s is None or pool.start_s >= 0) for pool in report.pools)


@pytest.mark.parametrize("off_s", [HOUR_S, -HOUR_S])
def test_the_trainers_own_clock_may_be_wrong(off_s):
    store = an_iteration()
    key = layout.training(0)
    training = records.read(store, TrainingRecord, key)
    moved = {name: getattr(training, name) + off_s for name in ("started_at_s", "ended_at_s")}
    records.put(store, key, replace(training, **moved))
    report = conclude(store)
    assert report.metrics["timing_s/train"] <= 100
    assert 1000 <= report.train_started_at_s <= report.train_ended_at_s <= 1100


def test_right_clocks_are_left_alone(caplog):
    assert conclude(with_clocks({})).lives == conclude(an_iteration()).lives
    assert "clock" not in caplog.text


@pytest.mark.parametrize("behind_s", [HOUR_S, 24 * HOUR_S])
def test_the_clock_of_the_conclusion_may_be_behind(behind_s, caplog):
    store = an_iteration()
    right = conclude(an_iteration())
    report = conclude_iteration(store, 0, PRICES, ManualClock(1100.0 - behind_s), egress_usd_per_gb={"rollout": 0.02})
    assert "behind that of the plan" in caplog.text
    assert all(value >= 0 for name, value in report.metrics.items() if name.startswith(("timing_s/", "cost/")))
    assert report.metrics["timing_s/iteration"] == pytest.approx(right.metrics["timing_s/iteration"], abs=30)
    assert report.metrics["timing_s/rollout"] == right.metrics["timing_s/rollout"]
    assert report.created_at_s >= report.train_ended_at_s


def test_a_rollout_that_ends_seconds_before_its_plan_takes_no_negative_time():
    store = an_iteration()
    plan = records.read(store, PlanRecord, layout.plan(0))
    for name in NAMES:
        key = layout.alive(0, name)
        told = records.read(store, HeartbeatRecord, key)
        moved = replace(told, started_at_s=plan.created_at_s - 9, updated_at_s=plan.created_at_s - 3, working_at_s=None)
        records.put(store, key, moved)
    assert conclude(store).metrics["timing_s/rollout"] == 0
