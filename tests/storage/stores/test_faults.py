"""Each fault does what its name says, once in so many calls; and where none strikes, a wrapped store is a store."""

import random
from dataclasses import fields

import pytest

from storage.clock import ManualClock
from storage.stores.faults import Crashed, CrashingStore, Fault, FaultRates, FaultyStore, TornStore
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing, StoreDenied, StoreUnavailable, commit
from storage.testing import StoreContract

NEVER = 10**9


class TestFaultyStoreInCalm(StoreContract):
    @pytest.fixture
    def store(self) -> FaultyStore:
        return FaultyStore(MemoryStore(), FaultRates(latency_s=0.1), random.Random(0), ManualClock())


class TestCrashingStoreBeforeItsCrash(StoreContract):
    @pytest.fixture
    def store(self) -> CrashingStore:
        return CrashingStore(MemoryStore(), NEVER)


class TestTornStoreBeforeItsTear(StoreContract):
    races, many_keys, overwrites = 20, 1200, 50

    @pytest.fixture
    def store(self, tmp_path) -> TornStore:
        return TornStore(LocalStore(tmp_path, fsync=False), NEVER, Crashed())


def faulty(inner, clock=None, later=None, **rates):
    return FaultyStore(inner, FaultRates(**rates), random.Random(1), clock or ManualClock(), later)


WRITES = [lambda s: s.create("a", b"new"), lambda s: s.put("a", b"new"), lambda s: s.delete("old")]
READS = [lambda s: s.get("old"), lambda s: s.list("")]


def a_store():
    store = MemoryStore()
    store.put("old", b"old")
    return store


@pytest.mark.parametrize("rates", [{"throttled": 1.0}, {"request_lost": 1.0, "timeout_s": 20.0}])
def test_a_refused_or_lost_request_does_nothing(rates):
    inner, clock = a_store(), ManualClock()
    for call in WRITES + READS:
        with pytest.raises(StoreUnavailable):
            call(faulty(inner, clock, **rates))
    assert inner.list("") == ["old"]
    assert clock.monotonic() == len(WRITES + READS) * rates.get("timeout_s", 0.0)


def test_a_denied_request_does_nothing_and_a_full_store_only_takes_no_more():
    inner = a_store()
    for call in WRITES + READS:
        with pytest.raises(StoreDenied, match="403"):
            call(faulty(inner, denied=1.0))
    full = faulty(inner, full=1.0)
    for call in WRITES[:2]:
        with pytest.raises(StoreDenied, match="no space"):
            call(full)
    assert [call(full) for call in READS] == [b"old", ["old"]]
    full.delete("old")
    assert inner.list("") == []


def test_a_listing_in_pages_misses_what_is_created_behind_it():
    inner = MemoryStore()
    for name in "bcd":
        inner.put(name, b"there")

    class Creating(ManualClock):
        """When the second page is asked for, one object is created behind it, and one before it."""

        waits = 0

        def sleep(self, duration_s):
            self.waits += 1
            if self.waits == 3:
                inner.create("a", b"new")
                inner.create("e", b"new")

    assert faulty(inner, Creating(), latency_s=1.0, page_keys=2).list("") == list("bcde")
    assert faulty(inner, page_keys=2).list("b") == ["b"]
    assert faulty(inner, page_keys=2).list("", after="b") == list("cde")


def test_a_late_write_is_done_after_its_caller_gave_up_and_a_late_read_is_lost():
    inner, clock, pending = a_store(), ManualClock(), []
    store = faulty(inner, clock, lambda delay_s, effect: pending.append((delay_s, effect)), request_late=1, timeout_s=9)
    for call in WRITES + READS:
        with pytest.raises(StoreUnavailable, match="request_late"):
            call(store)
    assert inner.list("") == ["old"]
    assert len(pending) == len(WRITES)
    for delay_s, effect in pending:
        assert 9 <= delay_s <= 18
        effect()
    assert inner.list("") == ["a"]


def test_a_late_request_needs_somebody_to_do_it():
    with pytest.raises(ValueError, match="only with `later`"):
        faulty(a_store(), request_late=1.0).put("a", b"new")


def test_a_lost_answer_leaves_the_effect_and_commit_finds_out():
    inner, clock = a_store(), ManualClock()
    for call in WRITES:
        with pytest.raises(StoreUnavailable, match="answer lost"):
            call(faulty(inner, clock, answer_lost=1.0, timeout_s=5.0))
    assert inner.list("") == ["a"]
    assert clock.monotonic() == 15.0

    class LosesAnswersToCreates(FaultyStore):
        def get(self, key, start=0, end=None):
            return inner.get(key, start, end)

    store = LosesAnswersToCreates(inner, FaultRates(answer_lost=1.0), random.Random(0), clock)
    assert commit(store, "b", b"mine") is True
    assert commit(store, "b", b"theirs") is False


def test_a_create_that_was_retried_below_denies_its_own_object():
    inner = a_store()
    store = faulty(inner, answer_retried=1.0)
    assert store.create("a", b"mine") is False
    assert inner.get("a") == b"mine"
    assert store.get("a") == b"mine"
    assert commit(store, "b", b"mine too") is True
    assert commit(store, "b", b"theirs") is False


@pytest.mark.parametrize(("fault", "during"), [("pause_before", []), ("pause_after", ["a"])])
def test_a_zombie_stands_still_before_or_after_the_effect_and_goes_on(fault, during):
    inner, seen = MemoryStore(), []

    class Watched(ManualClock):
        def sleep(self, duration_s):
            seen.append((duration_s, inner.list("")))

    store = faulty(inner, Watched(), **{fault: 1.0, "pause_s": (30.0, 60.0)})
    assert store.create("a", b"new") is True
    assert len(seen) == 1
    assert 30.0 <= seen[0][0] <= 60.0
    assert seen[0][1] == during


def test_latency_is_slept_on_the_way_there_and_back():
    clock = ManualClock()
    store = faulty(a_store(), clock, latency_s=2.0)
    for _ in range(500):
        store.get("old")
    assert 500 * 4.0 * 0.9 < clock.monotonic() < 500 * 4.0 * 1.1
    with pytest.raises(ObjectMissing):
        store.get("a")


def test_faults_strike_as_often_as_told_and_the_same_for_the_same_seed():
    def run():
        store = faulty(a_store(), throttled=0.1, request_lost=0.05, answer_lost=0.2)
        told = []
        for _ in range(2000):
            try:
                store.get("old")
            except StoreUnavailable as error:
                told.append(str(error))
        return store.struck, told

    struck, told = run()
    assert (struck, told) == run()
    assert set(struck) == {Fault.THROTTLED, Fault.REQUEST_LOST, Fault.ANSWER_LOST}
    assert 150 < struck[Fault.THROTTLED] < 250
    assert 70 < struck[Fault.REQUEST_LOST] < 135
    assert 330 < struck[Fault.ANSWER_LOST] < 470
    assert len(told) == struck.total()


def test_the_weather_can_change():
    store = faulty(a_store(), throttled=1.0)
    with pytest.raises(StoreUnavailable):
        store.get("old")
    store.rates = FaultRates()
    assert store.get("old") == b"old"


def test_every_fault_has_a_rate_and_impossible_rates_are_refused():
    assert {fault.value for fault in Fault} <= {field.name for field in fields(FaultRates)}
    for rates in ({"throttled": -0.1}, {"throttled": 0.6, "answer_lost": 0.6}):
        with pytest.raises(ValueError, match="fault rates: value"):
            FaultRates(**rates)


@pytest.mark.parametrize(("moment", "found"), [("before", ["old"]), ("after", ["a", "old"]), ("later", ["old"])])
def test_a_process_dies_at_its_nth_call_and_stays_dead(moment, found):
    inner, pending = a_store(), []
    store = CrashingStore(inner, 2, moment, later=lambda delay_s, effect: pending.append((delay_s, effect)), delay_s=7)
    assert store.get("old") == b"old"
    assert store.list("") == ["old"]
    assert store.last_call is None
    with pytest.raises(Crashed, match=f"crashed {moment} create a"):
        store.create("a", b"new")
    assert store.last_call == "create a"
    for call in WRITES + READS:
        with pytest.raises(Crashed, match="create a"):
            call(store)
    assert inner.list("") == found
    assert [delay_s for delay_s, _ in pending] == ([7] if moment == "later" else [])
    for _, effect in pending:
        effect()
    assert inner.list("") == ["a", "old"] or moment == "before"


def test_only_writes_may_be_counted():
    store = CrashingStore(a_store(), 1, writes_only=True)
    for _ in range(5):
        store.get("old")
    store.put("a", b"1")
    store.list("")
    with pytest.raises(Crashed, match="before put b"):
        store.put("b", b"1")
    with pytest.raises(Crashed):
        store.get("old")


def test_a_crash_is_not_caught_by_handlers_of_errors():
    assert not issubclass(Crashed, Exception)
    with pytest.raises(ValueError, match="moment: value 'later'"):
        CrashingStore(a_store(), 0, "later")


@pytest.mark.parametrize("failure", [Crashed("power cut"), StoreDenied("no space left")])
def test_a_torn_write_leaves_half_a_temporary_file_and_nothing_that_a_reader_trusts(tmp_path, failure):
    inner = LocalStore(tmp_path, fsync=False)
    store = TornStore(inner, 1, failure)
    assert store.create("folder/first", b"whole") is True
    for write in (store.create, store.put):
        with pytest.raises(type(failure)):
            write("folder/second", b"0123456789")
    torn = [path for path in tmp_path.rglob("*") if path.is_file() and path.name.startswith(".tmp-")]
    assert [path.read_bytes() for path in torn] == [b"01234", b"01234"]
    assert inner.list("") == store.list("") == ["folder/first"]
    with pytest.raises(ObjectMissing):
        store.get("folder/second")
    assert inner.create("folder/second", b"0123456789") is True
    assert inner.get("folder/second") == b"0123456789"
