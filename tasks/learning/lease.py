"""Keeping the run's lease while a task of the execution that holds it works."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from storage.clock import Clock
from storage.records.run import beat_lease
from storage.stores.store import ObjectStore, StorageError

log = logging.getLogger(__name__)
BEATS_PER_TTL = 5


@contextmanager
def keep_lease(store: ObjectStore, execution: str, ttl_s: float, clock: Clock) -> Iterator[None]:
    """Refresh the run's lease from a thread, so that no other execution takes over the run."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(ttl_s / BEATS_PER_TTL):
            try:
                beat_lease(store, execution, clock)
            except StorageError as error:
                log.warning("the run's lease could not be refreshed: %s", error)

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
