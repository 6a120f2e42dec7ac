"""A store below a key prefix of another store, for stores that keep no hierarchy of their own.

Knows nothing about what the keys mean.
"""

from storage.memory import check_prefix
from storage.store import ObjectMissing, ObjectStore, check_key


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
