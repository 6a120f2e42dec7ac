import threading

import pytest

from storage.stores.memory import MemoryStore, NestedStore
from storage.stores.metered import KEYS_PER_LIST, MeteredStore, Requests, metered, requests_of
from storage.stores.store import ObjectMissing, ObjectStore, read_into
from storage.testing import StoreContract


class TestMeteredStore(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MeteredStore(MemoryStore("metered"))


def test_every_request_is_counted_as_it_is_charged_for():
    store = MeteredStore(MemoryStore())
    assert store.create("a", b"123")
    assert not store.create("a", b"456")
    store.put("b", b"12345")
    assert (store.get("a"), store.get("b", 1, 3)) == (b"123", b"23")
    view = memoryview(bytearray(4))
    assert read_into(store, "b", 2, view) == 3
    store.delete("a")
    assert store.list("") == ["b"]
    assert store.requests == Requests(puts=4, gets=3, bytes_read=3 + 2 + 3)


def test_what_fails_was_asked_for_too():
    store = MeteredStore(MemoryStore())
    with pytest.raises(ObjectMissing):
        store.get("nothing")
    assert store.requests == Requests(gets=1)


@pytest.mark.parametrize(
    ("keys", "pages"), [(0, 1), (1, 1), (KEYS_PER_LIST, 1), (KEYS_PER_LIST + 1, 2), (2 * KEYS_PER_LIST + 1, 3)]
)
def test_a_long_listing_is_several_requests(keys, pages):
    inner = MemoryStore()
    for number in range(keys):
        inner.put(f"k/{number:05d}", b"x")
    store = MeteredStore(inner)
    assert len(store.list("k/")) == keys
    assert store.requests == Requests(puts=pages)


def test_threads_lose_no_count():
    store = MeteredStore(MemoryStore())
    store.put("a", b"12")
    threads = [threading.Thread(target=lambda: [store.get("a") for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.requests == Requests(puts=1, gets=2000, bytes_read=4000)


def test_a_store_that_counts_goes_on_counting():
    plain = MemoryStore()
    assert requests_of(plain) == Requests()
    counted = metered(plain)
    counted.put("a", b"1")
    assert metered(counted) is counted
    assert requests_of(counted) == Requests(puts=1)
    NestedStore(counted, "below").put("a", b"1")
    assert requests_of(counted) == Requests(puts=2)
