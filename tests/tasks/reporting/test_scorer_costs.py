"""The dollars of scorers whose pool has another name by the time that the iteration is concluded."""

from dataclasses import replace

import pytest

from storage.clock import SystemClock
from storage.journal.liveness import read_heartbeat
from storage.records import layout, records
from storage.records.run import read_report
from storage.stores.memory import NestedStore
from tasks.concluding.iteration import commit_and_report
from tasks.learning.score_iteration import score_iteration
from tests.scored_run import SCORING, URL, settings
from tests.small_run import memory_store, plan_iteration, roll_out, train_small


def named(model, pool, price):
    given = settings(model, {"path": str(model), "pool": "teachers"})
    pools = {pool: replace(given.pools.scoring["teachers"], usd_per_hour=price)}
    return replace(given, teacher=replace(given.teacher, pool=pool), pools=replace(given.pools, scoring=pools))


@pytest.mark.parametrize(
    ("names", "usd"),
    [(("teachers", "renamed"), 2 * 3.0 + 2 * 5.0), (("teachers", "between", "renamed"), 2 * 3.0 + 2 * 7.0 + 2 * 7.0)],
    ids=["once", "twice"],
)
def test_scorers_of_a_pool_that_is_renamed_meanwhile_cost_something(model, names, usd):
    """Renamed twice, the price of the pool in the middle is known to no configuration: the last price stands for it."""
    store = memory_store("scored")
    prices = dict(zip(("teachers", "between", "renamed"), (3.0, 100.0, 7.0), strict=True))
    prices |= {"renamed": 5.0} if len(names) == 2 else {}
    for number, name in enumerate(names):
        reference = plan_iteration(named(model, name, prices[name]))
        if not number:
            roll_out(URL, 0)
        score_iteration(URL, 0, number, lambda: False, SystemClock())
    within = NestedStore(store, SCORING.rstrip("/"))
    keys = within.list(layout.alive_all(0))
    assert sorted(read_heartbeat(within, key).pool for key in keys) == sorted(names)
    for key in keys:
        beat = read_heartbeat(within, key)
        records.put(within, key, replace(beat, started_at_s=100.0, updated_at_s=100.0 + 2 * 3600))
    train_small(URL, 0)
    commit_and_report(reference, last=False)
    assert read_report(store, 0).metrics["cost/usd_score"] == pytest.approx(usd)
