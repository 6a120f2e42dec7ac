"""Heartbeats and notes about a crew that cannot be read: whoever looks at one goes on. Add a body to UNREADABLE."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.journal.liveness import Liveness, read_heartbeat
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.crew_records import ended_slots, note_rollout_ended
from storage.records.failures import last_failures, slot_failures
from storage.stores.memory import MemoryStore
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.rollout import RolloutConfig
from tasks.crew_model.rebalance import Seeker, Transfers
from tasks.reporting.crew_presence import await_goodbyes
from tasks.reporting.watch import Watcher
from tasks.sampling.session.claimant import Claimant
from tasks.sampling.session.crew_watch import CrewLost, CrewWatch
from tasks.sampling.session.member import helping_slot
from tests.committed_runs import begin
from tests.journals import Incarnation, a_plan, beat, newer_heartbeat
from tests.kept_failures import keep_slot

TTL_S = 30.0
NAME = "00000-other"
KEY = layout.alive(0, NAME)
PLAN = a_plan(2, 2, slots=2)
ROLLOUT = RolloutConfig(flush_interval_s=5.0, claim_ttl_s=TTL_S)
WHOLE = records.encode(KEY, beat(NAME, number=1))


def changed(**fields):
    return records.encode(KEY, replace(beat(NAME, number=1), **fields))


UNREADABLE = {
    "garbage": b"\x00\xff garbage",
    "one byte": b"{",
    "cut": WHOLE[:-10],
    "flipped": WHOLE.replace(b'"beat":1', b'"beat":7'),
    "one more field": newer_heartbeat(KEY),
    "another format": WHOLE.replace(b'"format":1', b'"format":2'),
    "another kind": WHOLE.replace(b'"kind":"heartbeat"', b'"kind":"plan"'),
    "another's": records.encode(layout.alive(0, "00000-x"), beat("00000-x", number=1)),
    "another's under its own key": changed(incarnation="00000-x"),
    "deep": b"[" * 100_000,
    "bignum": b"9" * 10_000,
    "negative counts": changed(running=-3),
    "negative slot": changed(slot=-1),
    "not a number": changed(tokens_per_s=float("nan")),
    "infinite steps": changed(step_s=((1, float("inf")),)),
}


@pytest.fixture(params=UNREADABLE.values(), ids=UNREADABLE)
def store(request):
    """A planned run in which a member has claimed slot 0, and its heartbeat cannot be read."""
    store = MemoryStore()
    begin(store)
    records.commit(store, layout.plan(0), PLAN)
    member = Incarnation(store, PLAN, 0, NAME)
    member.write(0, [1, 2])
    member.write(1, [1], Finish.RUNNING)
    store.put(KEY, request.param)
    return store


@pytest.fixture
def clock():
    return ManualClock()


def touch(store):
    """The member beats: the bytes change, and are no better than before."""
    store.put(KEY, store.get(KEY) + b" ")


def test_it_is_a_sign_of_life_that_changes_or_not(store, clock):
    liveness = Liveness(store, 0, clock)
    assert read_heartbeat(store, KEY) is None
    assert liveness.look([NAME])[NAME].record is None
    clock.advance(TTL_S - 1)
    touch(store)
    sign = liveness.look([NAME])[NAME]
    assert (sign.silent_s, sign.changed, sign.lost(TTL_S)) == (0, True, False)
    clock.advance(TTL_S)
    assert liveness.look([NAME])[NAME].lost(TTL_S)


def test_a_member_takes_what_is_left_once_it_is_silent_and_not_before(store, clock):
    me = Claimant(store, PLAN, incarnation="00001-me", slot=1, claim_ttl_s=TTL_S, clock=clock, parallel_reads=1)
    me.take_own_slot()

    def look():
        me.refresh()
        seen = me.look(me.owned(), held=0, released=0)
        turns = Transfers(Seeker(room=8, running=0), seen.holders, seen.unclaimed)
        transfer = turns.next()
        return seen, transfer and [item.response for item in me.take(transfer).work]

    seen, taken = look()
    assert (seen.holders[NAME].unfinished, seen.nothing_left, taken) == (1, False, None)
    clock.advance(TTL_S)
    assert look()[1] == [1]
    assert look()[0].nothing_left


def test_a_member_that_still_beats_and_has_ended_all_is_not_waited_for(store, clock):
    ended = a_plan(1, 1, slots=1)
    other = MemoryStore()
    Incarnation(other, ended, 0, NAME).write(0, [1, 2])
    other.put(KEY, store.get(KEY))
    helper = Claimant(other, ended, incarnation="00001-me", slot=1, claim_ttl_s=TTL_S, clock=clock, parallel_reads=1)
    helper.refresh()
    assert helper.look({}, held=0, released=0).nothing_left


def test_the_trainer_counts_whoever_still_beats_as_living(store, clock):
    watch = CrewWatch(store, PLAN, ROLLOUT, PlanningConfig(), clock, execution="e", crew_ended=True, parallel_reads=1)
    assert not watch.lives()
    for _ in range(20):
        clock.advance(5.0)
        touch(store)
        watch.check(progressed=False)
        assert watch.lives()
        assert not watch.works()
    clock.advance(TTL_S)
    watch.check(progressed=False)
    clock.advance(TTL_S)
    with pytest.raises(CrewLost, match="slot 0"):
        watch.check(progressed=False)


def test_a_conclusion_does_not_wait_for_its_goodbye(store, clock):
    await_goodbyes(store, PLAN, 8.0, clock)
    assert clock.monotonic() == 0


def test_a_watcher_shows_the_member_by_its_claims(store, clock):
    watcher = Watcher(store, clock)

    def shown():
        [member] = [member for member in watcher.look().members if member.incarnation == NAME]
        return member.slot, member.state, member.unfinished

    assert shown() == (0, "unknown", 1)
    clock.advance(3600)
    assert shown() == (0, "silent", 1)
    touch(store)
    assert shown() == (0, "unknown", 1)


@pytest.mark.parametrize("name", ["x", "x-y", "00007", "00007-a.b", "-1-a", "9" * 5000 + "-a"])
def test_a_key_that_no_member_writes_does_not_keep_helpers_away(name):
    store = MemoryStore()
    store.put(layout.alive(0, name), b"anything")
    store.put(layout.alive_all(0) + "stray", b"anything")
    assert helping_slot(store, PLAN) == 2
    store.put(layout.alive(0, "00004-abc"), b"anything")
    assert helping_slot(store, PLAN) == 5


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
def test_notes_that_cannot_be_read_are_passed_over(body, clock):
    store = MemoryStore()
    note_rollout_ended(store, 0, "e", "rollout", [0, 1])
    note_rollout_ended(store, 0, "e", "far", [2])
    keep_slot(store, 0, "e", 0, "x")
    keep_slot(store, 0, "e", 1, "y")
    for key in store.list(""):
        if key.endswith(("/far.json", "/00001.json")):
            store.put(key, body)
    assert ended_slots(store, 0, "e") == {0, 1}
    assert [*slot_failures(store, 0, "e")] == [0]
    assert [found.slot for found in last_failures(store, 0)] == [0]
