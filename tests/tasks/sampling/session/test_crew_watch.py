"""Who is taken for living, and when the trainer is left alone or the crew is lost."""

import logging
import re
from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord, note_rollout_ended
from storage.records.records import JOINED_POOL, TRAIN_POOL
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreDenied, StoreUnavailable
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.rollout import RolloutConfig
from tasks.sampling.session.crew_watch import NEVER_WROTE, CrewLost, CrewWatch, LeftAlone
from tests.kept_failures import keep_slot
from tests.sessions import a_plan

ROLLOUT = RolloutConfig(flush_interval_s=5.0, claim_ttl_s=30.0)
AUTO = PlanningConfig(seeding="auto")
OFF = PlanningConfig()
EXECUTION = "here:host:1"


class Member:
    """Writes heartbeats."""

    def __init__(self, store, slot, pool="rollout", name="0"):
        self.store, self.slot = store, slot
        self.record = HeartbeatRecord(
            incarnation=f"{slot:05d}-{name:0>16}",
            slot=slot,
            state="working",
            beat=0,
            pool=pool,
            host="a-machine",
            pid=1,
            started_at_s=0,
            updated_at_s=0,
            tokens_generated=0,
            tokens_recovered=0,
            prefill_tokens=0,
            responses_finished=0,
            engine="e",
            batch_invariant=True,
        )

    def beat(self, state="working"):
        self.record = replace(self.record, beat=self.record.beat + 1, state=state)
        records.put(self.store, layout.alive(0, self.record.incarnation), self.record)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def clock():
    return ManualClock()


def a_watch(store, clock, planning=AUTO, **given):
    return CrewWatch(
        store, a_plan(), ROLLOUT, planning, clock, execution=EXECUTION, parallel_reads=1, seeding_after_s=100.0, **given
    )


def raised_after(watch, clock, limit_s=1000.0, member=None):
    """Seconds until `check` raises; whoever beats does so every five of them."""
    for second in range(0, int(limit_s), 5):
        if member is not None:
            member.beat()
        try:
            watch.check(progressed=False)
        except LeftAlone:
            return second
        clock.sleep(5.0)
    return None


def test_with_nobody_there_the_trainer_is_left_alone_after_the_time_that_is_set(store, clock):
    assert raised_after(a_watch(store, clock), clock) == 100


def test_with_seeding_off_it_never_is_and_it_says_once_a_minute_what_it_waits_for(store, clock, caplog):
    caplog.set_level(logging.WARNING)
    assert raised_after(a_watch(store, clock, OFF), clock, 300.0) is None
    told = [line for line in caplog.messages if "no member has lived" in line]
    assert len(told) == 4
    assert "waiting for slots 0, 1; planning.seeding is 'off'" in told[0]


@pytest.mark.parametrize("pool", ["rollout", JOINED_POOL])
def test_a_member_that_beats_lives(store, clock, pool):
    assert raised_after(a_watch(store, clock), clock, member=Member(store, 7, pool)) is None


def test_the_trainers_own_member_does_not_count(store, clock):
    assert raised_after(a_watch(store, clock), clock, member=Member(store, 7, TRAIN_POOL)) == 100


def test_the_time_counts_from_the_last_sign_of_life(store, clock):
    watch, member = a_watch(store, clock), Member(store, 0)
    assert raised_after(watch, clock, 50.0, member) is None
    # It is silent from second 45 on, and counts as living for claim_ttl_s.
    assert 45 + 100 <= 50 + raised_after(watch, clock) <= 45 + 30 + 100


def test_a_member_that_left_is_gone_at_once(store, clock):
    watch, member = a_watch(store, clock), Member(store, 0)
    member.beat()
    assert not watch.lives()
    member.beat()
    assert watch.lives()
    member.beat("gone")
    assert not watch.lives()


def test_who_died_before_the_watch_began_is_not_taken_for_living(store, clock):
    Member(store, 0).beat()
    watch = a_watch(store, clock)
    assert not watch.lives()
    assert raised_after(watch, clock) == 100


def test_who_comes_after_the_watch_began_lives_from_its_first_beat(store, clock):
    watch = a_watch(store, clock)
    assert not watch.lives()
    Member(store, 1).beat()
    assert watch.lives()


def test_what_is_journalled_shows_that_somebody_lives(store, clock):
    watch = a_watch(store, clock)
    for _ in range(60):
        clock.sleep(5.0)
        watch.check(progressed=True)
    assert raised_after(watch, clock) == 100


def test_of_a_thousand_dead_the_living_one_is_found(store, clock):
    for name in range(300):
        Member(store, 0, name=str(name)).beat()
    member = Member(store, 1, name="ffff")
    watch = a_watch(store, clock)
    assert raised_after(watch, clock, 600.0, member) is None


def test_however_many_died_before_the_watch_began_none_is_taken_for_living(store, clock):
    for name in range(300):
        Member(store, 0, name=str(name)).beat()
    assert raised_after(a_watch(store, clock), clock) == 100


def look_twice(watch, clock):
    """What the last members wrote is read between two looks."""
    watch.check(progressed=False)
    clock.sleep(5.0)
    watch.check(progressed=False)


def end_maps(store, *slots):
    note_rollout_ended(store, 0, EXECUTION, "rollout", slots)


def test_what_was_journalled_last_is_read_before_the_crew_is_given_up(store, clock):
    """The journal is read before the notes: members may have written, left and been noted in between."""
    watch = a_watch(store, clock, OFF)
    end_maps(store, 0, 1)
    watch.check(progressed=False)
    clock.sleep(5.0)
    watch.check(progressed=True)


def test_the_time_alone_counts_from_the_first_look_and_not_from_before(store, clock):
    """Reward models are opened in between, which takes minutes."""
    watch, member = a_watch(store, clock), Member(store, 0)
    for _ in range(30):
        member.beat()
        clock.sleep(5.0)
    assert raised_after(watch, clock, 300.0, member) is None


def test_only_a_member_with_weights_takes_over(store, clock):
    watch, member = a_watch(store, clock), Member(store, 0)
    assert not watch.works()
    member.beat("loading")
    assert watch.lives()
    assert not watch.works()
    member.beat()
    assert watch.works()


def test_once_every_slot_has_ended_nothing_is_waited_for(store, clock):
    watch, member = a_watch(store, clock), Member(store, 0)
    member.beat()
    end_maps(store, 0)
    watch.check(progressed=False)
    note_rollout_ended(store, 0, EXECUTION, "far", [1])
    clock.sleep(5.0)
    member.beat()  # a zombie of a slot that has ended
    with pytest.raises(LeftAlone):
        look_twice(watch, clock)


def test_what_another_execution_ended_does_not_count(store, clock):
    note_rollout_ended(store, 0, "another", "rollout", [0, 1])
    a_watch(store, clock).check(progressed=False)


def test_where_generating_brought_nothing_it_is_not_tried_again_at_once(store, clock):
    end_maps(store, 0, 1)
    assert raised_after(a_watch(store, clock, at_once=False), clock) == 100


def test_a_member_that_joined_is_waited_for_until_it_falls_silent(store, clock):
    joined = Member(store, 9, JOINED_POOL)
    joined.beat()
    end_maps(store, 0, 1)
    watch = a_watch(store, clock, OFF)
    for _ in range(6):
        watch.check(progressed=False)  # it may live, although it was not seen to beat
        clock.sleep(5.0)
    with pytest.raises(CrewLost):
        look_twice(watch, clock)


def test_when_nobody_can_go_on_the_members_own_errors_are_told(store, clock):
    keep_slot(store, 0, EXECUTION, 0, "ValueError: no space left")
    Member(store, 1).beat()
    end_maps(store, 0, 1)
    with pytest.raises(CrewLost) as raised:
        look_twice(a_watch(store, clock, OFF), clock)
    assert "slot 0: ValueError: no space left" in str(raised.value)
    assert "slot 1: was killed on a-machine" in str(raised.value)


def test_of_a_slot_that_never_wrote_anything_that_is_said(store, clock):
    with pytest.raises(CrewLost, match=r"slot 1: wrote nothing into the run; the state of its pods"):
        look_twice(a_watch(store, clock, OFF, crew_ended=True), clock)


def test_of_a_standing_member_an_error_in_an_earlier_iteration_is_told(store, clock):
    keep_slot(store, 2, EXECUTION, 0, "ValueError: an old one")
    keep_slot(store, 3, EXECUTION, 0, "ValueError: bad image")
    for crew, told in (("standing", "slot 0: ValueError: bad image"), ("iteration", f"slot 0: {NEVER_WROTE}")):
        watch = CrewWatch(
            store,
            replace(a_plan(), iteration=5),
            replace(ROLLOUT, crew=crew),
            OFF,
            clock,
            execution=EXECUTION,
            parallel_reads=1,
            crew_ended=True,
        )
        with pytest.raises(CrewLost, match=re.escape(told)):
            look_twice(watch, clock)


def test_the_last_failure_of_a_slot_is_the_one_that_is_told(store, clock):
    for text in ("first", "second"):
        keep_slot(store, 0, EXECUTION, 0, f"ValueError: {text}")
        clock.sleep(1.0)
    end_maps(store, 0, 1)
    with pytest.raises(CrewLost, match="slot 0: ValueError: second"):
        look_twice(a_watch(store, clock, OFF), clock)


class Refuses(MemoryStore):
    """A store whose disk is full, or that does not answer."""

    error = None

    def put(self, key, body):
        if self.error is not None:
            raise self.error
        super().put(key, body)


def test_a_crew_that_could_not_even_note_its_end_is_not_waited_for(clock):
    store = Refuses()
    Member(store, 0).beat()
    store.error = StoreDenied("writing failed: No space left on device")
    with pytest.raises(CrewLost, match=r"no member lives, and none can journal.*No space left on device"):
        raised_after(a_watch(store, clock, OFF), clock, 300.0)
    assert clock.monotonic() <= 120


def test_a_store_that_does_not_answer_for_a_while_ends_no_watch(clock):
    store = Refuses()
    store.error = StoreUnavailable("no answer")
    assert raised_after(a_watch(store, clock, OFF), clock, 300.0) is None


def test_a_writable_store_is_left_as_it_was(store, clock):
    raised_after(a_watch(store, clock, OFF), clock, 300.0)
    assert store.list("") == []


def test_who_waits_is_told_why_members_failed(store, clock, caplog):
    keep_slot(store, 0, EXECUTION, 1, "OSError: No space left on device")
    raised_after(a_watch(store, clock, OFF), clock, 100.0)
    assert "an attempt of slot 1 failed: OSError: No space left on device" in caplog.text


EXPIRED = (
    "StoreDenied: cannot put s3://b/run/x: refused: check the credentials (ExpiredToken); so it was at 16 attempts"
)


def test_a_crew_that_the_store_refused_to_the_end_is_not_waited_for_though_its_map_has_not_ended(store, clock):
    keep_slot(store, 0, EXECUTION, 0, EXPIRED)
    keep_slot(store, 0, EXECUTION, 1, "StoreUnfit: no hard links", at_s=253_402_300_799.0)
    with pytest.raises(CrewLost) as raised:
        raised_after(a_watch(store, clock, OFF), clock)
    assert clock.monotonic() < 30
    assert f"slot 0: {EXPIRED}" in str(raised.value)
    assert "slot 1: StoreUnfit: no hard links" in str(raised.value)


def test_a_trainer_that_can_generate_does_so_at_once_when_the_store_has_refused_the_crew(store, clock):
    for slot in (0, 1):
        keep_slot(store, 0, EXECUTION, slot, EXPIRED)
    assert raised_after(a_watch(store, clock), clock) < 30


@pytest.mark.parametrize("error", [None, "StoreUnavailable: no answer", "EngineDied: StoreDenied: not of this one"])
def test_a_slot_that_may_come_again_is_waited_for(store, clock, error):
    keep_slot(store, 0, EXECUTION, 0, EXPIRED)
    if error is not None:
        keep_slot(store, 0, EXECUTION, 1, error)
    assert raised_after(a_watch(store, clock, OFF), clock, 300.0) is None


def test_a_member_that_lives_is_waited_for_though_the_store_has_refused_the_slots(store, clock):
    for slot in (0, 1):
        keep_slot(store, 0, EXECUTION, slot, EXPIRED)
    assert raised_after(a_watch(store, clock, OFF), clock, 300.0, member=Member(store, 9, JOINED_POOL)) is None
    with pytest.raises(CrewLost):
        raised_after(a_watch(store, clock, OFF), clock, 100.0)


def test_why_no_member_works_is_told_as_soon_as_it_is_known_and_then_once_a_minute(store, clock, caplog):
    watch = a_watch(store, clock, OFF)
    keep_slot(store, 0, EXECUTION, 0, EXPIRED, host="far-away", at_s=86_400.0)
    raised_after(watch, clock, 20.0)
    assert f"an attempt of slot 0 failed: {EXPIRED} (on far-away, 1970-01-02 00:00:00 UTC by its clock)" in caplog.text
    assert "waiting for slots 1; planning.seeding is 'off'" in caplog.text
    raised_after(watch, clock, 40.0)
    assert caplog.text.count("no member has lived") == 1
    Member(store, 1).beat()
    end_maps(store, 1)
    with pytest.raises(CrewLost, match="slot 1: was killed on a-machine, or the store refused to be told why it ended"):
        raised_after(watch, clock, 100.0)


def test_of_many_slots_some_are_named(store, clock, caplog):
    for slot in range(20):
        keep_slot(store, 0, EXECUTION, slot, "ValueError: no")
    raised_after(a_watch(store, clock, OFF), clock, 20.0)
    assert caplog.text.count("an attempt of slot") == 8
    assert "and 12 more slots" in caplog.text
