"""Lives of members without a readable heartbeat, and what a report says of their costs."""

from dataclasses import replace

import pytest

from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from tests.journals import newer_heartbeat
from tests.tasks.reporting.test_conclusion import an_iteration, conclude

NEWER = b"a heartbeat with one more field"


def of(report, incarnation):
    [life] = [life for life in report.lives if life.incarnation == incarnation]
    return life


@pytest.mark.parametrize("body", [None, b"garbage", b"[" * 100_000, NEWER])
def test_a_life_without_a_readable_heartbeat_is_built_from_claims_and_journal(body, caplog):
    told, store = conclude(an_iteration()), an_iteration()
    for name in ("00000-b", "00001-c"):
        key = layout.alive(0, name)
        store.delete(key)
        if body is not None:
            store.put(key, body if body != NEWER else newer_heartbeat(key))
    report = conclude(store)
    for name, decoded in (("00000-b", 6), ("00001-c", 7)):
        life, as_told = of(report, name), of(told, name)
        assert (life.slot, life.pool, life.state) == (as_told.slot, "rollout", "gone")
        assert (life.tokens_kept, life.tokens_recovered, life.tokens_regenerated) == (
            decoded,
            as_told.tokens_recovered,
            0,
        )
        # From the plan to the last heartbeat that can be read, which is that of 00000-a.
        assert (life.started_at_s, life.ended_at_s) == (1000.0, 1020.0)
    assert (told.metrics["cost/lives_estimated"], report.metrics["cost/lives_estimated"]) == (0, 2)
    assert report.rewards == told.rewards
    [line] = [line for line in caplog.messages if "is estimated" in line]
    assert "00000-b, 00001-c made claims" in line


def test_without_any_heartbeat_all_lives_last_from_the_plan_to_the_end_of_training():
    store = an_iteration()
    for key in store.list(layout.alive_all(0)):
        store.delete(key)
    report = conclude(store)
    assert [(life.incarnation, life.state) for life in report.lives] == [
        ("00000-a", "lost"),
        ("00000-b", "gone"),
        ("00001-c", "gone"),
    ]
    assert {(life.started_at_s, life.ended_at_s) for life in report.lives} == {(1000.0, 1075.0)}
    assert report.metrics["cost/lives_estimated"] == 3


def test_a_pool_that_nobody_priced_does_not_keep_an_iteration_from_its_end():
    store = an_iteration()
    key = layout.alive(0, "00001-c")
    records.put(store, key, replace(records.read(store, HeartbeatRecord, key), pool="elsewhere"))
    assert of(conclude(store), "00001-c").pool == "rollout"
