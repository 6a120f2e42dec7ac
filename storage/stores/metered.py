"""A store that counts the requests that providers charge for, and the bytes that were read.

Retries inside the store below count once. Deleting is free, and not counted. Knows no prices.
"""

import threading
from dataclasses import dataclass

from storage.stores.store import ObjectStore, read_into

# The most keys that one request lists on S3.
KEYS_PER_LIST = 1000


@dataclass(frozen=True, slots=True)
class Requests:
    """Numbers of requests by price, and bytes read.

    Attributes:
        puts: writes and listings, which cost the same.
        gets: reads, also of missing objects.
        bytes_read: bytes of the bodies read.
    """

    puts: int = 0
    gets: int = 0
    bytes_read: int = 0

    def __add__(self, other: "Requests") -> "Requests":
        return Requests(self.puts + other.puts, self.gets + other.gets, self.bytes_read + other.bytes_read)

    def __sub__(self, other: "Requests") -> "Requests":
        return Requests(self.puts - other.puts, self.gets - other.gets, self.bytes_read - other.bytes_read)


class MeteredStore:
    """`store` with a count, in `requests`, of what was asked of it through this object, answered or not."""

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
    """The store with a count; a store that already counts is returned unchanged, with its earlier requests."""
    return store if isinstance(store, MeteredStore) else MeteredStore(store)


def requests_of(store: ObjectStore) -> Requests:
    """The requests that the store has counted; none if it does not count."""
    return store.requests if isinstance(store, MeteredStore) else Requests()
