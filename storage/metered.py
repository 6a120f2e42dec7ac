"""A store that counts: requests as providers charge for them, and bytes that were read.

What a store below retries by itself counts once. Deleting is free, and not counted. Knows no prices.
"""

import threading
from dataclasses import dataclass

from storage.store import ObjectStore, read_into

# What one request lists at most, on S3.
KEYS_PER_LIST = 1000


@dataclass(frozen=True, slots=True)
class Requests:
    """puts: writes, and listings, which cost the same; gets: reads, of what is missing, too. bytes_read: by these."""

    puts: int = 0
    gets: int = 0
    bytes_read: int = 0

    def __add__(self, other: "Requests") -> "Requests":
        return Requests(self.puts + other.puts, self.gets + other.gets, self.bytes_read + other.bytes_read)


class MeteredStore:
    """`store`, and in `requests` what was asked of it through this object, answered or not."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._requests = Requests()

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def requests(self) -> Requests:
        return self._requests

    def create(self, key: str, body: bytes) -> bool:
        self._count(Requests(puts=1))
        return self._store.create(key, body)

    def put(self, key: str, body: bytes) -> None:
        self._count(Requests(puts=1))
        self._store.put(key, body)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._count(Requests(gets=1))
        body = self._store.get(key, start, end)
        self._count(Requests(bytes_read=len(body)))
        return body

    def get_into(self, key: str, start: int, view: memoryview) -> int:
        self._count(Requests(gets=1))
        length = read_into(self._store, key, start, view)
        self._count(Requests(bytes_read=length))
        return length

    def list(self, prefix: str, after: str = "") -> list[str]:
        self._count(Requests(puts=1))
        keys = self._store.list(prefix, after)
        self._count(Requests(puts=max(0, len(keys) - 1) // KEYS_PER_LIST))
        return keys

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def _count(self, more: Requests) -> None:
        with self._lock:
            self._requests += more


def metered(store: ObjectStore) -> MeteredStore:
    """The store itself when it counts already, so that what it was asked before counts, too."""
    return store if isinstance(store, MeteredStore) else MeteredStore(store)


def requests_of(store: ObjectStore) -> Requests:
    """What a store was asked, as far as it counts."""
    return store.requests if isinstance(store, MeteredStore) else Requests()
