"""ObjectStore: the five verbs that every part of Gleaner is built on, and their errors.

A store is rooted at one run; keys are relative, '/'-separated, in [A-Za-z0-9._-]. docs/format.md section 1 says what a
store must offer: atomic create-if-absent, read-after-write, listing in key order. Nothing here compares clocks, renames
or swaps.
"""

import re
from typing import Protocol, runtime_checkable

from storage.errors import GleanerError

KEY_PATTERN = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


class StorageError(GleanerError):
    """Base of the errors of the store and of the bytes in it.

    StorageError
      ObjectMissing       no object under that key
      StoreUnavailable    no answer within the deadline, or retries exhausted; the outcome of a write is unknown
      StoreDenied         credentials missing or refused, bucket or directory not writable
      StoreUnfit          the store does not offer what the protocol needs (probe)
      CorruptObject       bytes that do not pass their checksum or schema; never used
      ConflictingRecord   a create-only object exists with other content
    """


class ObjectMissing(StorageError, LookupError):  # noqa: N818 - reads as what happened
    def __init__(self, key: str) -> None:
        super().__init__(f"no object {key!r}")
        self.key = key


class StoreUnavailable(StorageError, TimeoutError):  # noqa: N818
    pass


class StoreDenied(StorageError, PermissionError):  # noqa: N818
    pass


class StoreUnfit(StorageError):  # noqa: N818
    pass


class CorruptObject(StorageError, ValueError):  # noqa: N818
    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"object {key!r} is corrupt: {reason}")
        self.key = key
        self.reason = reason


class ConflictingRecord(StorageError):  # noqa: N818
    pass


@runtime_checkable
class ObjectStore(Protocol):
    """Bytes under keys. Several threads may call it; every call has its own deadline."""

    @property
    def url(self) -> str:
        """The root of the store, for messages and references; holds no secret."""
        ...

    def create(self, key: str, body: bytes) -> bool:
        """Write a non-empty body if no object has this key: True if this call created it, False if an object exists.

        False does not say whose object exists, because the answer to a successful write can be lost: use `commit`.
        Raises StoreUnavailable if the outcome is unknown.
        """
        ...

    def put(self, key: str, body: bytes) -> None:
        """Write or overwrite. A reader sees the old body or the new one, never a mixture."""
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of the object, `end` clipped to its size; raises ObjectMissing."""
        ...

    def list(self, prefix: str, after: str = "") -> list[str]:
        """All keys that begin with `prefix` and sort after `after`, in ascending order; never cached."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is no error."""
        ...


@runtime_checkable
class ReadsInto(Protocol):
    """An optional ability of a store: reading without a copy."""

    def get_into(self, key: str, start: int, view: memoryview) -> int:
        """Fill `view` with bytes from `start` on; returns how many there were. Raises ObjectMissing."""
        ...


def read_into(store: ObjectStore, key: str, start: int, view: memoryview) -> int:
    """`get_into` for any store: fill the writable `view`, a flat buffer of bytes; returns how many bytes there were."""
    if isinstance(store, ReadsInto):
        return store.get_into(key, start, view)
    body = store.get(key, start, start + len(view))
    view[: len(body)] = body
    return len(body)


def check_key(key: str) -> str:
    """Return `key`; raises ValueError if it could leave the run's directory or is not portable."""
    if not KEY_PATTERN.fullmatch(key) or any(part in (".", "..") for part in key.split("/")):
        raise ValueError(f"not a storage key: {key!r} (allowed: parts of [A-Za-z0-9._-] joined by '/')")
    return key


def commit(store: ObjectStore, key: str, body: bytes) -> bool:
    """Create `key` exactly once: True if the stored object is `body`, False if another writer's object is there.

    `body` must hold a nonce or be named by its content, so that equal bytes mean one's own write. Lost answers are
    resolved by reading back (docs/format.md algorithm C). Raises StoreUnavailable if the outcome stays unknown.
    """
    try:
        if store.create(key, body):
            return True
    except StoreUnavailable as error:
        try:
            return store.get(key) == body
        except ObjectMissing:
            raise StoreUnavailable(f"writing {key!r} failed and left nothing behind: {error}") from error
    return store.get(key) == body
