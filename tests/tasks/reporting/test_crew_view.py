"""Who is shown of a crew, and as what: states, ages, successors, members that joined."""

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.records import SettingsRecord
from tasks.reporting.watch import Watcher
from tests.journals import Incarnation
from tests.watched_run import PLAN, TTL_S, beat, planned, steal


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store():
    return planned()


@pytest.fixture
def watcher(store, clock):
    return Watcher(store, clock)


def rows(view):
    return [(member.slot, member.incarnation, member.state) for member in view.members]


def test_before_anybody_has_come_every_slot_has_a_row(watcher):
    view = watcher.look()
    assert rows(view) == [(0, None, "not come"), (1, None, "not come")]
    assert [member.unfinished for member in view.members] == [4, 4]
    assert (view.totals.responses_planned, view.totals.groups_planned) == (8, 4)
    assert [group.group for group in view.waits_for] == [0, 1, 2, 3]
    assert {response.holder for group in view.waits_for for response in group.unfinished} == {None}


def test_the_age_of_a_heartbeat_is_what_was_seen_of_it(store, watcher, clock):
    Incarnation(store, PLAN, 0, "00000-a")
    beat(store, "00000-a", 5)

    def look():
        member = watcher.look().members[0]
        return member.state, member.heartbeat_age_s

    assert look() == ("working", None)
    clock.advance(10)
    assert look() == ("working", None)
    beat(store, "00000-a", 6)
    assert look() == ("working", 0.0)
    clock.advance(TTL_S - 1)
    assert look() == ("working", TTL_S - 1)
    clock.advance(1)
    assert look() == ("silent", TTL_S)
    beat(store, "00000-a", 7)
    assert look() == ("working", 0.0)
    beat(store, "00000-a", 8, state="gone")
    clock.advance(10 * TTL_S)
    assert look()[0] == "gone"


def test_who_never_changed_falls_silent_too(store, watcher, clock):
    Incarnation(store, PLAN, 0, "00000-a")
    beat(store, "00000-a", 5)
    watcher.look()
    clock.advance(TTL_S)
    member = watcher.look().members[0]
    assert (member.state, member.heartbeat_age_s) == ("silent", None)


def test_how_long_others_wait_is_taken_from_the_settings_in_force(store, watcher, clock):
    records.put(store, layout.settings(0), SettingsRecord(config={"rollout": {"claim_ttl_s": 3 * TTL_S}}))
    Incarnation(store, PLAN, 0, "00000-a")
    beat(store, "00000-a", 5)
    watcher.look()
    clock.advance(2 * TTL_S)
    assert watcher.look().members[0].state == "working"


def test_a_member_tells_what_its_heartbeat_says(store, watcher):
    member = Incarnation(store, PLAN, 0, "00000-a")
    beat(store, "00000-a", 1, running=2, waiting=1, acting=4, unfinished=9, tokens_per_s=12.5)
    member.write(0, [1])
    [first, _] = watcher.look().members
    assert (first.pool, first.host, first.running, first.waiting, first.acting) == ("spot", "node-1", 2, 1, 4)
    assert (first.tokens_generated, first.tokens_recovered, first.tokens_per_s) == (7, 3, 12.5)
    assert first.unfinished == 3  # by the journal


def test_responses_that_wait_for_tools_are_those_of_members_at_work(store, watcher, clock):
    for slot, name in ((0, "00000-a"), (1, "00001-a")):
        Incarnation(store, PLAN, slot, name)
        beat(store, name, 1, acting=3)
    assert watcher.look().totals.acting == 6
    clock.advance(TTL_S)
    beat(store, "00001-a", 2, acting=2)
    assert watcher.look().totals.acting == 2


def test_the_rate_of_the_crew_leaves_out_who_is_gone_silent_or_idle(store, watcher, clock):
    for slot, name in ((0, "00000-a"), (1, "00001-a")):
        Incarnation(store, PLAN, slot, name)
        beat(store, name, 1, tokens_per_s=100.0)
    assert watcher.look().totals.tokens_per_s == 200
    clock.advance(TTL_S)
    beat(store, "00001-a", 2, tokens_per_s=150.0)
    assert watcher.look().totals.tokens_per_s == 150
    beat(store, "00000-a", 2)
    beat(store, "00001-a", 3, state="gone", tokens_per_s=150.0)
    assert watcher.look().totals.tokens_per_s is None


def test_of_a_slot_that_was_lost_the_successor_is_shown(store, watcher):
    Incarnation(store, PLAN, 0, "00000-a").write(0, [1, 2])
    beat(store, "00000-a", 1)
    assert rows(watcher.look())[0] == (0, "00000-a", "working")
    successor = Incarnation(store, PLAN, 0, "00000-b")
    beat(store, "00000-b", 1, state="loading")
    view = watcher.look()
    assert rows(view) == [(0, "00000-b", "loading"), (1, None, "not come")]
    assert (view.totals.claims, view.totals.moved) == (2, 0)
    for response in (1, 4, 5):
        successor.write(response, [1])
    beat(store, "00000-b", 2, state="gone")
    assert rows(watcher.look())[0] == (0, "00000-b", "gone")


def test_a_claim_without_a_heartbeat_is_shown_as_unknown(store, watcher):
    Incarnation(store, PLAN, 0, "00000-a")
    assert rows(watcher.look())[0] == (0, "00000-a", "unknown")


def test_a_member_that_joined_is_shown_before_it_has_claimed_anything_and_while_it_works(store, watcher, clock):
    Incarnation(store, PLAN, 0, "00000-a")
    beat(store, "00007-j", 1, state="loading")
    joined = [member for member in watcher.look().members if member.joined]
    assert [(member.slot, member.incarnation, member.unfinished) for member in joined] == [(7, "00007-j", 0)]
    steal(store, 0, (0, 1), "00000-a", "00007-j")
    view = watcher.look()
    assert (view.totals.claims, view.totals.moved) == (2, 2)
    assert [member.unfinished for member in view.members] == [2, 4, 2]
    beat(store, "00007-j", 2, state="gone")
    assert rows(watcher.look())[2] == (7, "00007-j", "gone")  # what it holds is for anybody to take
    steal(store, 0, (0, 1), "00007-j", "00000-a")
    assert len(watcher.look().members) == 2
    beat(store, "00008-j", 1)
    assert rows(watcher.look())[2] == (8, "00008-j", "working")
    clock.advance(TTL_S)
    assert all(member.slot != 8 for member in watcher.look().members)


def test_a_slot_whose_work_was_all_taken_keeps_its_row(store, watcher):
    Incarnation(store, PLAN, 0, "00000-a")
    beat(store, "00000-a", 1, state="gone")
    steal(store, 0, PLAN.responses_of(0), "00000-a", "00001-a")
    assert rows(watcher.look()) == [(0, "00000-a", "gone"), (1, "00001-a", "unknown")]
