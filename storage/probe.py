"""The check at the start of a run that the store offers what the protocol needs; some servers ignore conditions."""

from contextlib import suppress

from storage import layout, records
from storage.store import ObjectMissing, ObjectStore, StorageError, StoreUnfit, commit


def probe(store: ObjectStore) -> None:
    """Create, read, list and delete one small object with a random name below `layout.PROBE`.

    Raises StoreUnfit, which says what the store lacks, or StoreDenied or StoreUnavailable if it cannot be used at all.
    """
    # A store that does not answer fails here, before there is an object whose removal would wait for it again.
    store.list(layout.PROBE)
    name = records.nonce()
    key = f"{layout.PROBE}{name}"
    try:
        _check(store, key, first=f"first {name}".encode(), second=f"second {name}".encode())
    finally:
        with suppress(StorageError):
            store.delete(key)
    if key in store.list(layout.PROBE):
        raise _lack(store, "a deleted object is still listed")


def _check(store: ObjectStore, key: str, first: bytes, second: bytes) -> None:
    try:
        if not commit(store, key, first):
            raise _lack(store, "a new object does not hold the bytes it was created with")
        if store.create(key, second):
            raise _lack(
                store, "creating an object that exists succeeds, so the condition of an atomic create is ignored"
            )
        if store.get(key) != first:
            raise _lack(store, "a refused create has changed the object")
        if store.get(key, 1, 4) != first[1:4]:
            raise _lack(store, "reading a range of bytes gives other bytes")
    except ObjectMissing:
        raise _lack(store, "an object cannot be read right after it was written") from None
    if key not in store.list(layout.PROBE):
        raise _lack(store, "an object is not listed right after it was written")
    if key in store.list(layout.PROBE, after=key):
        raise _lack(store, "listing after a key shows that key again")


def _lack(store: ObjectStore, what: str) -> StoreUnfit:
    return StoreUnfit(f"{store.url} cannot hold a run: {what}")
