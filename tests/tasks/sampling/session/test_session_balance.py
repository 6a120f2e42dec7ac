"""Sessions that help others: take over the dead, join, hand over, wait, and stop when the iteration is closed."""

import threading
import time

import pytest

from storage.clock import ManualClock, SystemClock
from storage.journal.assembly import JournalReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import ClosedRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.session.session import BESIDE
from tasks.sampling.session.session_outcome import Preempted
from tests.sessions import (
    EXPECTED,
    GENERATIONS,
    GROUPS,
    IN_FLIGHT,
    SLOTS,
    Killed,
    a_plan,
    a_session,
    ask_for,
    live,
    load,
    responses,
)

HELPS_S = 1e6


def test_a_member_with_nothing_left_takes_over_the_dead_and_finishes_the_iteration_alone():
    store, clock = MemoryStore(), ManualClock()
    with pytest.raises(Killed):
        live(a_session(store, 0, steps=7, flush_interval_s=2.0))
    outcome = live(a_session(store, 1, clock=clock, flush_interval_s=2.0, idle_timeout_s=HELPS_S))
    assert responses(store) == EXPECTED
    assert outcome.tokens_recovered > 0


def test_one_that_joined_works_without_any_slot_and_loads_weights_only_for_work():
    store, clock, loads = MemoryStore(), ManualClock(), []
    joined = a_session(
        store, SLOTS, clock=clock, load=lambda engine, heed: loads.append(1) or load(engine, heed), idle_timeout_s=9.0
    )
    assert live(joined).responses_finished == GROUPS * GENERATIONS
    assert responses(store) == EXPECTED
    assert loads == [1]
    again = a_session(store, SLOTS + 1, load=lambda *_: pytest.fail("there is no work"), idle_timeout_s=HELPS_S)
    assert live(again).responses_finished == 0


def test_one_that_joined_leaves_when_its_time_is_up_and_loses_nothing():
    store = MemoryStore()
    joined = a_session(
        store, SLOTS, clock=ManualClock(), idle_timeout_s=HELPS_S, flush_interval_s=60.0, time_limit_s=6.0
    )
    left = live(joined)
    alive = records.read(store, HeartbeatRecord, layout.alive(0, joined.incarnation))
    assert (alive.state, alive.running, alive.waiting) == ("gone", 0, IN_FLIGHT - left.responses_finished)
    assert alive.unfinished == IN_FLIGHT - left.responses_finished
    outcome = live(a_session(store, 0, idle_timeout_s=HELPS_S))
    assert responses(store) == EXPECTED
    assert outcome.tokens_recovered + left.tokens_generated > left.tokens_generated


def test_it_waits_for_work_no_longer_than_the_idle_timeout_once_its_own_unit_has_ended():
    store, clock = MemoryStore(), ManualClock()
    busy = a_session(store, 1)
    busy.claim()

    def beats():
        busy.beat()  # it lives, and holds on to what is its own
        return False

    member = a_session(store, 0, clock=clock, flush_interval_s=1.0, idle_timeout_s=3.0, notice=beats)
    busy.state.holdings.waiting.clear()
    busy.state.holdings.held.clear()
    live(member)
    assert 3.0 <= clock.monotonic() - max(len(tokens) for tokens, _, _ in EXPECTED) < 80
    reader = JournalReader(store, a_plan())
    reader.refresh()
    assert reader.book.held_by(busy.incarnation) == set(a_plan().responses_of(1))


def test_what_is_handed_over_is_continued_by_whoever_comes_without_a_wait():
    store = MemoryStore()
    giver = a_session(store, 0, clock=ManualClock(), flush_interval_s=1.0)
    giver.claim()
    while giver.clock.monotonic() < 6.0:
        giver.advance()
    given = sorted(giver.state.holdings.in_flight)[:2]
    ask_for(store, giver, given)
    ask_for(store, giver, given)
    while giver.clock.monotonic() < 9.0:  # a flush and a heartbeat, before the first look
        giver.advance()
    alive = records.read(store, HeartbeatRecord, layout.alive(0, giver.incarnation))
    assert alive.released == 2
    live(a_session(store, 1))
    taker = a_session(store, SLOTS, clock=ManualClock(), idle_timeout_s=HELPS_S)
    taker.claim()
    assert sorted(taker.state.holdings.held) == given
    assert all(held.token_ids for held in taker.state.holdings.held.values())


@pytest.mark.slow
def test_what_nobody_takes_it_takes_again_itself():
    store = MemoryStore()
    giver = a_session(store, 0, clock=ManualClock(), flush_interval_s=1.0)
    giver.claim()
    while giver.clock.monotonic() < 6.0:
        giver.advance()
    ask_for(store, giver, list(giver.state.holdings.held))
    live(giver)
    live(a_session(store, 1))
    assert responses(store) == EXPECTED


@pytest.mark.parametrize("after", [0, 5])
def test_it_stops_when_the_trainer_closes_the_iteration(after):
    store = MemoryStore()

    def closes():
        nonlocal after
        after -= 1
        if after == 0:
            records.commit(store, layout.closed(0), ClosedRecord(iteration=0, reason="done"))
        return False

    if after == 0:
        closes()
        records.commit(store, layout.closed(0), ClosedRecord(iteration=0, reason="done"))
    outcome = live(a_session(store, 0, clock=ManualClock(), flush_interval_s=1.0, notice=closes))
    assert outcome.tokens_generated <= 8 * IN_FLIGHT
    assert (outcome.tokens_generated == 0) == (not store.list("iterations/000000/claims/"))


def test_a_notice_while_weights_are_loading_is_heeded_and_hands_over():
    told = []

    def slow(engine, heed):
        told.append(True)
        heed()
        pytest.fail("it goes on loading")

    store = MemoryStore()
    member = a_session(store, 0, load=slow, notice=lambda: bool(told))
    with pytest.raises(Preempted):
        live(member)
    alive = records.read(store, HeartbeatRecord, layout.alive(0, member.incarnation))
    assert (alive.state, alive.unfinished) == ("gone", len(a_plan().responses_of(0)))


def test_a_notice_before_the_claim_claims_nothing():
    store = MemoryStore()
    with pytest.raises(Preempted):
        live(a_session(store, 0, notice=lambda: True))
    assert store.list("") == []


class Unsteady(MemoryStore):
    """Refuses the first requests that name a claim."""

    refusals = 3

    def list(self, prefix: str, after: str = "") -> list[str]:
        if "/claims/" in prefix and self.refusals:
            self.refusals -= 1
            raise StoreUnavailable("slow down")
        return super().list(prefix, after)


def test_a_store_that_is_out_for_a_moment_does_not_end_a_member_that_comes():
    store, clock = Unsteady(), ManualClock()
    outcome = live(a_session(store, 0, clock=clock))
    assert outcome.responses_finished == len(a_plan().responses_of(0))
    assert store.refusals == 0
    store.refusals = 9
    with pytest.raises(StoreUnavailable):
        live(a_session(store, 1))


def test_an_engine_that_fails_says_gone_so_that_nobody_waits():
    store = MemoryStore()
    victim = a_session(store, 0)

    def fails():
        raise EngineError("out of memory")

    victim.engine.step = fails
    with pytest.raises(EngineError):
        victim.run()
    alive = records.read(store, HeartbeatRecord, layout.alive(0, victim.incarnation))
    assert (alive.state, alive.unfinished > 0) == ("gone", True)


def test_a_slow_look_does_not_keep_a_notice_from_being_heeded():
    """The look is another thread's, and the decode lane must not wait for it."""
    store = MemoryStore()
    live(a_session(store, 0))
    busy = a_session(store, 1)
    busy.claim()
    listing, looking, heeded = store.list, threading.Event(), []

    def slow(prefix, after=""):
        if "/claims/" in prefix and threading.current_thread() is not threading.main_thread() and not heeded:
            looking.set()
            while not member.state.leaving and len(heeded) < 6000:
                heeded.append(time.sleep(0.01))
        return listing(prefix, after)

    member = a_session(
        store,
        SLOTS,
        clock=SystemClock(),
        in_threads=True,
        flush_interval_s=0.1,
        idle_timeout_s=HELPS_S,
        notice=looking.is_set,
    )
    store.list = slow
    with pytest.raises(Preempted):
        live(member)
    assert len(heeded) < 6000, "the notice was heeded only after the look had ended"


@pytest.mark.slow
def test_closed_while_it_decodes_it_leaves_no_thread_behind():
    store = MemoryStore()
    get, asked = store.get, []

    def closed_at_second_read(key, start=0, end=None):
        if key == layout.closed(0) and asked:
            return b"{}"
        asked.extend([key] if key == layout.closed(0) else [])
        return get(key, start, end)

    store.get = closed_at_second_read
    joined = a_session(store, SLOTS, clock=SystemClock(), in_threads=True, idle_timeout_s=HELPS_S)
    assert live(joined).responses_finished == 0
    lanes = {f"{lane.value} lane" for lane in BESIDE}
    assert not [thread for thread in threading.enumerate() if thread.name in lanes]
    store.get = get
    assert records.read(store, HeartbeatRecord, layout.alive(0, joined.incarnation)).state == "gone"
