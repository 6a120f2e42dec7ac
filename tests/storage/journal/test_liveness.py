"""An observer's view of heartbeats: only change counts, on its own clock."""

from storage.clock import ManualClock
from storage.journal.liveness import Liveness
from storage.records import layout, records
from storage.stores.memory import MemoryStore
from tests.journals import a_plan, beat, newer_heartbeat

TTL_S = 30.0


def test_silence_is_counted_from_the_last_change_that_this_observer_saw():
    store, clock = MemoryStore(), ManualClock(1000.0)
    liveness = Liveness(store, a_plan(1, 1).iteration, clock)
    records.put(store, layout.alive(0, "a"), beat("a", number=1))
    assert liveness.look(["a"])["a"].silent_s == 0
    clock.advance(29)
    assert not liveness.look(["a"])["a"].lost(TTL_S)
    clock.advance(1)
    assert liveness.look(["a"])["a"].lost(TTL_S)
    records.put(store, layout.alive(0, "a"), beat("a", number=2))
    sign = liveness.look(["a"])["a"]
    assert sign.silent_s == 0
    assert sign.record is not None
    assert sign.record.beat == 2


def test_the_time_that_other_heartbeats_take_to_be_read_is_no_silence():
    """In history 1411 a request that hung for 30 s made a member take work from another one that lived."""

    class Slow(MemoryStore):
        def get(self, key, start=0, end=None):
            if key.endswith("/b.json"):
                clock.advance(TTL_S + 10)
            return super().get(key, start, end)

    store, clock = Slow(), ManualClock()
    for name in ("a", "b"):
        records.put(store, layout.alive(0, name), beat(name, number=1))
    liveness = Liveness(store, 0, clock, parallel_reads=1)
    liveness.look(["a"])
    clock.advance(1)
    signs = liveness.look(["a", "b"])
    assert signs["a"].silent_s == 1
    assert signs["b"].silent_s == 0


def test_who_said_gone_is_lost_at_once_and_who_never_spoke_after_a_while():
    store, clock = MemoryStore(), ManualClock()
    liveness = Liveness(store, 0, clock, parallel_reads=1)
    records.put(store, layout.alive(0, "a"), beat("a", number=1, state="gone"))
    signs = liveness.look(["a", "b"])
    assert signs["a"].lost(TTL_S)
    assert signs["b"].record is None
    assert not signs["b"].lost(TTL_S)
    clock.advance(TTL_S)
    assert liveness.look(["b"])["b"].lost(TTL_S)


def test_the_times_that_a_heartbeat_carries_are_not_looked_at():
    store, clock = MemoryStore(), ManualClock(5.0)
    liveness = Liveness(store, 0, clock)
    records.put(store, layout.alive(0, "a"), beat("a", number=1, updated_at_s=-1e9))
    assert not liveness.look(["a"])["a"].lost(TTL_S)


def test_a_heartbeat_of_a_later_version_is_a_sign_of_life_and_no_more():
    store, clock = MemoryStore(), ManualClock()
    liveness, key = Liveness(store, 0, clock), layout.alive(0, "a")
    assert not liveness.look(["a"])["a"].found
    for number in (1, 2, 3):
        store.put(key, newer_heartbeat(key, number))
        sign = liveness.look(["a"])["a"]
        assert (sign.record, sign.found, sign.silent_s, sign.changed) == (None, True, 0, number > 1)
        clock.advance(TTL_S - 1)
        assert not liveness.look(["a"])["a"].lost(TTL_S)
    clock.advance(1)
    assert liveness.look(["a"])["a"].lost(TTL_S)
