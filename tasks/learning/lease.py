"""Keeping the run's lease while a task of the execution that holds it works."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from storage.clock import Clock
from storage.records.run import beat_lease
from storage.stores.store import ObjectStore
from tasks.learning.beats import repeated

BEATS_PER_TTL = 5


@contextmanager
def keep_lease(store: ObjectStore, execution: str, ttl_s: float, clock: Clock) -> Iterator[None]:
    """Refresh the run's lease from a thread, so that no other execution takes over the run."""
    beat = partial(beat_lease, store, execution, clock)
    with repeated(beat, ttl_s / BEATS_PER_TTL, "lease", "the run's lease could not be refreshed"):
        yield
