"""Which run may pass which while runs wait to be admitted, and what others see of one that waits."""

import random

from hypothesis import given
from hypothesis import strategies as st

from storage.clock import ManualClock
from storage.fleet.fleet_reading import waiting_runs
from storage.stores.faults import FaultRates, FaultyStore
from storage.stores.memory import MemoryStore
from tasks.sharing.admission_queue import Waiting, may_not_pass
from tests.fleet_records import FLEET, TTL_S

WAITED_S = st.dictionaries(st.sampled_from("abcd"), st.floats(0, 1e4))


def test_a_run_passes_those_that_are_patient_and_none_that_has_waited_too_long():
    assert may_not_pass(0.0, {}, 60.0) is None
    assert may_not_pass(0.0, {"a": 59.0, "b": 60.0}, 60.0) is None
    assert may_not_pass(0.0, {"a": 61.0, "b": 90.0}, 60.0) == "b"
    assert may_not_pass(100.0, {"a": 61.0, "b": 90.0}, 60.0) is None
    assert may_not_pass(70.0, {"a": 61.0, "b": 90.0}, 60.0) == "b"


@given(waited_s=WAITED_S, patience_s=st.floats(0, 1e4))
def test_of_all_that_wait_one_at_least_is_in_no_other_ones_way(waited_s, patience_s):
    free = [
        name
        for name, own_s in waited_s.items()
        if may_not_pass(own_s, {other: s for other, s in waited_s.items() if other != name}, patience_s) is None
    ]
    assert bool(free) == bool(waited_s)
    assert all(waited_s[name] <= patience_s or waited_s[name] == max(waited_s.values()) for name in free)


class SharedClock(ManualClock):
    """One clock of several processes: while one of them sleeps, the others beat."""

    def __init__(self):
        super().__init__(0.0)
        self.waiting = []

    def sleep(self, duration_s):
        super().sleep(duration_s)
        for each in self.waiting:
            each.beat_if_due()


def test_a_run_is_seen_to_wait_until_it_ends_or_is_silent(caplog):
    store, clock = MemoryStore(), SharedClock()
    waiting = Waiting(store, FLEET, "memory://runs/a", clock)
    waiting.beat_if_due()
    waiting.rest()
    assert waiting.waited_s == clock.monotonic() == TTL_S / 6
    clock.waiting.append(waiting)
    [seen] = waiting_runs(store, FLEET, clock)
    assert (seen.run_url, seen.waited_s) == ("memory://runs/a", clock.monotonic())
    clock.waiting.clear()
    assert waiting_runs(store, FLEET, clock) == []
    assert "waiting for runs that wait for admission of the fleet to show that they live, since" in caplog.text
    for _ in range(12):
        waiting.rest()
    assert "waiting for the fleet memory:// to admit memory://runs/a, since" in caplog.text
    waiting.end()
    before_s = clock.monotonic()
    assert waiting_runs(store, FLEET, clock) == []
    assert clock.monotonic() == before_s


def test_a_store_that_refuses_does_not_end_the_waiting(caplog):
    inner, clock = MemoryStore(), ManualClock(0.0)
    store = FaultyStore(inner, FaultRates(request_lost=1.0), random.Random(1), clock)
    waiting = Waiting(store, FLEET, "memory://runs/a", clock)
    waiting.beat_if_due()
    assert "others cannot see" in caplog.text
    assert inner.list("") == []
