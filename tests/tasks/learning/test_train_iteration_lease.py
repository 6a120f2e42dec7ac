"""The lease of a run while it is trained."""

import threading
import time

from storage.clock import ManualClock
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.learning.train_iteration import keep_lease
from tests.small_run import EXECUTION, memory_store


def test_the_lease_is_shown_to_be_alive_while_training_and_not_after():
    store = memory_store("advance")
    with keep_lease(store, EXECUTION, 0.05, ManualClock(7.0)):
        deadline_s = time.monotonic() + 300
        while not store.list(layout.LEASE) and time.monotonic() < deadline_s:
            time.sleep(0.005)
    assert b'"holder":"test","at_s":7.000' in store.get(layout.LEASE_BEAT)
    store.delete(layout.LEASE_BEAT)
    time.sleep(0.03)
    assert store.list(layout.LEASE) == []


def test_a_store_that_does_not_take_the_beat_does_not_end_training(caplog):
    asked = threading.Semaphore(0)

    class Refusing(MemoryStore):
        def put(self, key, body):
            asked.release()
            raise StoreUnavailable("no answer")

    with keep_lease(Refusing(), EXECUTION, 0.05, ManualClock()):
        # When it is asked again, the first refusal has been told.
        assert all(asked.acquire(timeout=300) for _ in range(2))
    assert "the run's lease could not be refreshed: no answer" in caplog.text
