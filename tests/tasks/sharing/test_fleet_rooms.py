"""What a command sees of a fleet: which hosts live, which runs are seated on them, and how long they switch."""

import logging

import pytest

from storage.fleet import fleet_layout
from storage.fleet.fleet_records import LeftRecord
from storage.fleet.seats import take_seat
from storage.fleet.spent_records import SpentEntry, SpentRecord
from storage.records import records
from storage.stores.memory import MemoryStore
from tasks.sharing.fleet_rooms import look_at_rooms
from tests.fleet_records import FLEET, TTL_S, BeatingClock, a_beat, a_host, a_run

A, B, NEW = a_run("a"), a_run("b"), a_run("new")


@pytest.fixture
def store():
    return MemoryStore()


def admit(store, *runs):
    for run in runs:
        records.put(store, fleet_layout.admitted(run.id), run)


def announce(store, *names, state="idle", memory_bytes=100):
    for name in names:
        records.put(store, fleet_layout.host(name), a_host(name, memory_bytes))
        records.put(store, fleet_layout.alive(name), a_beat(name, 0, state))


def look(store, **beating):
    clock = BeatingClock(store, beating)
    seen = look_at_rooms(store, FLEET, clock, without=NEW.id)
    return seen, clock.monotonic() - 1000.0


def test_runs_are_where_their_seats_are_and_waiting_runs_where_placement_puts_them(store):
    admit(store, A, B)
    announce(store, "one", "two")
    take_seat(store, A.id, 0, "one")
    seen, took_s = look(store, one="idle", two="training")
    assert {room.host: room.seated for room in seen.rooms} == {"one": (A,), "two": (B,)}
    assert seen.machines == {"one": "a-machine", "two": "a-machine"}
    assert took_s < TTL_S / 6
    assert seen.rooms_for(NEW) == seen.rooms


def test_runs_of_a_silent_host_wait_and_hosts_that_leave_are_no_rooms(store):
    admit(store, A, B)
    announce(store, "silent", "alive", "leaves")
    announce(store, "gone", state="gone")
    take_seat(store, A.id, 0, "silent")
    take_seat(store, B.id, 0, "leaves")
    seen, took_s = look(store, alive="idle", leaves="leaving")
    assert [(room.host, set(room.seated)) for room in seen.rooms] == [("alive", {A, B})]
    assert TTL_S <= took_s < TTL_S + 2


def test_without_a_living_host_one_that_could_come_gets_all_runs(store):
    admit(store, A, B, NEW)
    announce(store, "silent")
    seen, _ = look(store)
    assert seen.rooms == ()
    [room] = seen.rooms_for(NEW)
    assert (room.host, set(room.seated), room.memory_bytes) == ("", {A, B}, 3)
    assert seen.switch_s is None
    [other] = seen.rooms_for(a_run("of-two-ranks", ranks=2))
    assert (other.devices, other.seated) == (2, ())


def test_runs_that_have_left_or_cannot_be_read_are_left_out(store, caplog):
    admit(store, A, B)
    records.put(store, fleet_layout.left(A.id), LeftRecord(id=A.id, reason="over", left_at_s=1.0))
    store.put(fleet_layout.admitted("0" * 16), b"{")
    with caplog.at_level(logging.WARNING):
        seen, _ = look(store)
    assert seen.runs == {B.id: B}
    assert "left out" in caplog.text


def test_the_switch_time_is_the_median_of_phases_with_their_parking(store):
    announce(store, "one")
    entries, now_s = [], 0.0
    for iteration, (switch_s, park_s) in enumerate([(1.0, 2.0), (30.0, 2.0), (2.0, 2.0)]):
        for kind, seconds in (("switch", switch_s), ("train", 50.0), ("park", park_s)):
            ended_s = now_s + seconds
            entries.append(SpentEntry(kind=kind, run=A.id, iteration=iteration, began_s=now_s, ended_s=ended_s))
            now_s = ended_s
    record = SpentRecord(host="one", sequence=0, entries=tuple(entries), seated=(A.id,))
    records.put(store, fleet_layout.spent("one", 0), record)
    assert look(store, one="idle")[0].switch_s == 4.0
