"""When a further window is worth a plan: a member that lives has no work, and each open window has a member."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.stores.memory import MemoryStore
from tasks.serving.idle_members import IdleMembers
from tests.journals import beat

TTL_S = 30.0


def written(store, name, number=2, step=0, **load):
    given = {"updated_at_s": 1e9, "state": "working"} | load
    records.put(store, layout.alive(step, name), replace(beat(name, number=number), **given))


@pytest.fixture
def crew():
    """Of two members in window 0 one has all the work."""
    store, clock = MemoryStore("idle"), ManualClock()
    written(store, "busy", claims=4, unfinished=1)
    written(store, "idle", claims=3)
    return store, clock, IdleMembers(store, clock)


@pytest.mark.parametrize("updated_at_s", [0.0, 1e12])
def test_a_member_without_work_counts_whatever_the_clock_of_its_machine(crew, updated_at_s):
    store, clock, members = crew
    written(store, "idle", updated_at_s=updated_at_s)
    assert members.is_any([0], TTL_S)
    clock.sleep(TTL_S + 1)
    written(store, "busy", number=3, claims=4, unfinished=1)
    assert not members.is_any([0], TTL_S)
    written(store, "idle", number=3, updated_at_s=updated_at_s)
    assert members.is_any([0], TTL_S)


@pytest.mark.parametrize("load", [{"unfinished": 1}, {"state": "gone"}, {"number": 1}])
def test_a_member_that_has_work_has_left_or_has_not_looked_does_not_count(crew, load):
    written(crew[0], "idle", **load)
    assert not crew[2].is_any([0], TTL_S)


def test_no_window_is_worth_a_plan_while_one_has_no_member(crew):
    store, _, members = crew
    written(store, "late", step=1)
    assert not members.is_any([0, 1], TTL_S)
    written(store, "late", step=1, number=3, claims=1, unfinished=1)
    assert members.is_any([0, 1], TTL_S)
