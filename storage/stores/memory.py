"""ObjectStore in this process's memory: the reference model for every other store.

It owns no file and no network, and nothing survives the process. Bodies are copied on the way in, so a caller that
reuses a buffer cannot change a stored body.
"""

import re
import threading

from storage.stores.store import ObjectMissing, ObjectStore, check_key

PREFIX_TAIL_PATTERN = re.compile(r"[A-Za-z0-9._-]*")


def check_prefix(prefix: str) -> str:
    """Return `prefix`; raises ValueError if no key can begin with it. The empty prefix matches every key."""
    folder, slash, tail = prefix.rpartition("/")
    if slash:
        check_key(folder)
    if not PREFIX_TAIL_PATTERN.fullmatch(tail):
        raise ValueError(f"not a key prefix: {prefix!r} (allowed: parts of [A-Za-z0-9._-] joined by '/')")
    return prefix


def check_range(start: int, end: int | None) -> None:
    """Raise ValueError unless 0 <= start <= end."""
    if start < 0 or (end is not None and end < start):
        raise ValueError(f"byte range: value [{start}, {end}); allowed: 0 <= start <= end")


def check_body(key: str, body: bytes) -> bytes:
    """Return `body`; raises ValueError if it is empty, because some clients drop the condition of an empty create."""
    if not body:
        raise ValueError(f"body of {key!r}: empty; allowed: at least one byte when an object is created")
    return body


class MemoryStore:
    """Objects in a dictionary behind one lock."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def create(self, key: str, body: bytes) -> bool:
        check_key(key)
        stored = bytes(check_body(key, body))
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = stored
        return True

    def put(self, key: str, body: bytes) -> None:
        check_key(key)
        stored = bytes(body)
        with self._lock:
            self._objects[key] = stored

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        check_range(start, end)
        with self._lock:
            body = self._objects.get(key)
        if body is None:
            raise ObjectMissing(key)
        return body[start:end]

    def list(self, prefix: str, after: str = "") -> list[str]:
        check_prefix(prefix)
        with self._lock:
            keys = list(self._objects)
        return sorted(key for key in keys if key.startswith(prefix) and key > after)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)


class NestedStore:
    """The objects of `store` whose keys begin with `prefix` and '/'; here their keys are what follows."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        """Raises ValueError if `prefix` cannot be a key."""
        self._store = store
        self._prefix = f"{check_key(prefix)}/"

    @property
    def url(self) -> str:
        return f"{self._store.url}/{self._prefix[:-1]}"

    def create(self, key: str, body: bytes) -> bool:
        return self._store.create(self._below(key), body)

    def put(self, key: str, body: bytes) -> None:
        self._store.put(self._below(key), body)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        try:
            return self._store.get(self._below(key), start, end)
        except ObjectMissing:
            raise ObjectMissing(key) from None

    def list(self, prefix: str, after: str = "") -> list[str]:
        check_prefix(prefix)
        keys = self._store.list(f"{self._prefix}{prefix}", f"{self._prefix}{after}" if after else "")
        return [key.removeprefix(self._prefix) for key in keys]

    def delete(self, key: str) -> None:
        self._store.delete(self._below(key))

    def _below(self, key: str) -> str:
        return f"{self._prefix}{check_key(key)}"
