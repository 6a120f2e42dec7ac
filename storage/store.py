"""ObjectStore: the five verbs that everything else is built on, and the errors they raise.

A store is rooted at one run; keys are relative, '/'-separated, in [A-Za-z0-9._-]. What a store must offer is written
in docs/format.md section 1: atomic create-if-absent, read-after-write, listing in key order. Nothing here compares
clocks, renames, or swaps.
"""

import re
from typing import Protocol, runtime_checkable

KEY_PATTERN = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


class StorageError(Exception):
    """Anything the store or the bytes in it did wrong.

    StorageError
      ObjectMissing       no object under that key
      StoreUnavailable    no answer within the deadline, or retries exhausted; the outcome of a write is unknown
      StoreDenied         credentials missing or refused, bucket or directory not writable
      StoreUnfit          the store does not offer what the protocol needs (probe)
      CorruptObject       bytes that do not pass their checksum or schema; never used
      ConflictingRecord   a create-only object exists with another content
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
    """Bytes under keys. Safe to call from several threads; every call has its own deadline."""

    @property
    def url(self) -> str:
        """Where the store is rooted, for messages and references; holds no secret."""
        ...

    def create(self, key: str, body: bytes) -> bool:
        """Write a non-empty body if no object has this key: True when this call created it, False when one exists.

        False proves nothing about whose object it is, because the answer to one's own successful write can be lost:
        use `commit`. Raises StoreUnavailable when the outcome is unknown.
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
    """What a store may offer beyond its verbs: reading without a copy."""

    def get_into(self, key: str, start: int, view: memoryview) -> int:
        """Fill `view` with bytes from `start` on; how many there were. Raises ObjectMissing."""
        ...


def read_into(store: ObjectStore, key: str, start: int, view: memoryview) -> int:
    """`get_into` of any store: fill the writable `view`, a flat buffer of bytes; how many bytes there were."""
    if isinstance(store, ReadsInto):
        return store.get_into(key, start, view)
    body = store.get(key, start, start + len(view))
    view[: len(body)] = body
    return len(body)


def check_key(key: str) -> str:
    """Return `key`, or raise ValueError when it could leave the run's directory or is not portable."""
    if not KEY_PATTERN.fullmatch(key) or any(part in (".", "..") for part in key.split("/")):
        raise ValueError(f"not a storage key: {key!r} (allowed: parts of [A-Za-z0-9._-] joined by '/')")
    return key


def commit(store: ObjectStore, key: str, body: bytes) -> bool:
    """Create `key` exactly once: True when the stored object is `body`, False when somebody else's is there.

    `body` must hold a nonce or be content-named, so that equal bytes mean one's own write. Resolves lost answers by
    reading back (docs/format.md algorithm C). Raises StoreUnavailable when the outcome stays unknown.
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
