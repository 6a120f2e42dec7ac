"""Which seats a host takes, as seen from one host on a clock that the test moves."""

import logging
from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import LeftRecord
from storage.fleet.seats import newest_seat, take_seat
from storage.records import records
from storage.stores.memory import MemoryStore
from tasks.sharing.seating import Seating
from tests.fleet_records import FLEET, TTL_S, a_beat, a_host, a_run

A, B = a_run("a"), a_run("b")


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def clock():
    return ManualClock(1000.0)


def admit(store, *runs):
    for run in runs:
        records.put(store, fleet_layout.admitted(run.id), run)


def announce(store, name, sequence=0, state="idle", memory_bytes=100):
    records.put(store, fleet_layout.host(name), a_host(name, memory_bytes))
    records.put(store, fleet_layout.alive(name), a_beat(name, sequence, state))


def seating(store, clock, name="me"):
    announce(store, name)
    return Seating(store, FLEET, a_host(name), clock)


def test_a_lone_host_takes_every_vacant_seat(store, clock):
    admit(store, A, B)
    mine = seating(store, clock)
    mine.look()
    assert mine.seated.keys() == {A.id, B.id}
    assert mine.is_mine(A.id)
    assert newest_seat(store, A.id).host == "me"


def test_two_hosts_divide_the_seats_and_keep_them(store, clock):
    admit(store, A, B)
    one, other = seating(store, clock, "one"), seating(store, clock, "other")
    for each in (one, other, one, other):
        each.look()
    assert len(one.seated) == len(other.seated) == 1
    assert one.seated.keys() | other.seated.keys() == {A.id, B.id}
    assert {newest_seat(store, run).epoch for run in (A.id, B.id)} == {1}


def test_the_seat_of_a_silent_host_is_taken_after_its_ttl_on_ones_own_clock(store, clock):
    admit(store, A)
    announce(store, "other")
    take_seat(store, A.id, 0, "other")
    mine = seating(store, clock)
    mine.look()
    for sequence in range(1, 5):
        clock.advance(TTL_S - 1)
        announce(store, "other", sequence)
        mine.look()
    assert mine.seated == {}
    clock.advance(TTL_S)
    mine.look()
    assert (newest_seat(store, A.id).host, newest_seat(store, A.id).epoch) == ("me", 2)


@pytest.mark.parametrize("garbage", [b"garbage", b"\0", b"{}"])
def test_a_heartbeat_that_cannot_be_read_is_a_sign_of_life_and_no_more(store, clock, garbage):
    admit(store, A)
    announce(store, "other")
    take_seat(store, A.id, 0, "other")
    mine = seating(store, clock)
    for _ in range(2):
        mine.look()
        clock.advance(TTL_S - 1)
        store.put(fleet_layout.alive("other"), garbage)
    mine.look()
    assert mine.seated == {}
    clock.advance(TTL_S)
    mine.look()
    assert mine.seated.keys() == {A.id}


def test_a_host_that_is_gone_has_lost_its_seats_at_once_and_one_that_leaves_keeps_them(store, clock):
    admit(store, A, B)
    announce(store, "other", state="leaving")
    take_seat(store, A.id, 0, "other")
    mine = seating(store, clock)
    mine.look()
    assert mine.seated.keys() == {B.id}
    announce(store, "other", 1, state="gone")
    mine.look()
    assert mine.seated.keys() == {A.id, B.id}


def test_a_host_that_leaves_is_given_no_seat(store, clock):
    admit(store, A, B)
    announce(store, "leaver", state="leaving")
    mine = seating(store, clock)
    mine.look()
    assert mine.seated.keys() == {A.id, B.id}


def test_a_seat_that_was_taken_over_is_no_longer_mine(store, clock):
    admit(store, A)
    mine = seating(store, clock)
    mine.look()
    announce(store, "other")
    take_seat(store, A.id, 1, "other")
    assert not mine.is_mine(A.id)
    assert mine.seated.keys() == {A.id}
    mine.look()
    assert mine.seated == {}


def test_a_run_that_has_left_has_no_seat(store, clock):
    admit(store, A, B)
    mine = seating(store, clock)
    mine.look()
    records.put(store, fleet_layout.left(A.id), LeftRecord(id=A.id, reason="done", left_at_s=0.0))
    mine.look()
    assert mine.seated.keys() == {B.id}


def test_what_is_corrupt_or_not_allowed_is_left_out_and_said_once(store, clock, caplog):
    admit(store, A)
    elsewhere = replace(A, id=fleet_layout.run_id("s3://x/y"), run_url="s3://x/y")
    admit(store, elsewhere)
    store.put(fleet_layout.admitted(B.id), b"garbage")
    store.put(fleet_layout.host("broken"), b"garbage")
    store.put(fleet_layout.RUNS + "note.txt", b"x")
    mine = seating(store, clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            mine.look()
    assert mine.seated.keys() == {A.id}
    assert len([each for each in caplog.records if "left out" in each.message]) == 3


def test_a_seat_that_cannot_be_read_is_not_taken(store, clock):
    admit(store, A, B)
    store.put(fleet_layout.seat(A.id, 1), b"garbage")
    mine = seating(store, clock)
    mine.look()
    assert mine.seated.keys() == {B.id}
    assert store.list(fleet_layout.seats(A.id)) == [fleet_layout.seat(A.id, 1)]


def test_a_state_that_no_host_holds_waits_for_one_that_does(store, clock):
    large = a_run("a", state_bytes=500)
    admit(store, large)
    small = seating(store, clock, "small")
    small.look()
    assert small.seated == {}
    announce(store, "large", memory_bytes=1000)
    roomy = Seating(store, FLEET, a_host("large", 1000), clock)
    roomy.look()
    assert roomy.seated.keys() == {large.id}


def test_a_host_that_was_forgotten_counts_again_when_it_takes_a_seat(store, clock):
    announce(store, "other")
    mine = seating(store, clock)
    mine.look()
    clock.advance(20 * TTL_S)
    mine.look()
    take_seat(store, A.id, 0, "other")
    announce(store, "other", 1)
    admit(store, A)
    mine.look()
    assert mine.seated == {}
    clock.advance(TTL_S)
    mine.look()
    assert mine.seated.keys() == {A.id}
