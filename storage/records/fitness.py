"""Proves by trial that a store offers what docs/format.md section 1 asks for; `gleaner check --store` prints the proof.

`probe`, at the start of each run, tries only the properties that some servers lack; `prove` is slower and stricter.
Every object written has a random name below `layout.PROBE` and is removed again. Neither knows how a store is made.
"""

import operator
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from storage.records import layout, records
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore
from storage.stores.race import Race, race_processes, race_threads
from storage.stores.store import ObjectMissing, ObjectStore, StorageError, StoreUnfit, commit

WRITERS = 16
# More than the 1000 keys that one page of an S3 listing holds.
LISTED_KEYS = 1200
READERS = 2
OVERWRITES_PER_KEY = 2
VERSION_BYTES = 50_000
POLL_INTERVAL_S = 0.0005
# Keys that sort differently as whole strings than by their parts or their numbers.
ORDERED = ("A", "_", "a-/x", "a.b/c", "a0", "b-/y", "b/10", "b/9", "b/9.x", "b0/1", "z")


@dataclass(frozen=True)
class Finding:
    """One property of a store or a machine.

    Attributes:
        shown: the evidence from a trial or a look.
        lack: the fault; None: the property holds.
    """

    name: str
    shown: str
    lack: str | None = None


def prove(
    store: ObjectStore, *, keys: int = 100, writers: int = WRITERS, listed: int = LISTED_KEYS
) -> Generator[Finding, None, None]:
    """Try one property after another; the store is fit if no finding has a lack.

    Args:
        store: may hold a run, which stays untouched.
        keys: how many keys the writers race for in each race, and how often each other check is repeated.
        writers: how many writers race.
        listed: how many keys one listing must show.

    Raises StoreDenied or StoreUnavailable if the store cannot be used at all. Close the generator if you do not read it
    to its end: it then removes what was written.
    """
    prefix = f"{layout.PROBE}{records.nonce()}/"
    checks: list[tuple[str, Callable[[], str]]] = [
        ("a second create is refused", lambda: _probe(store)),
        ("one winner among threads", lambda: _race(race_threads(store, _names(prefix, "thread", keys), writers))),
    ]
    if not isinstance(store, MemoryStore):
        checks.append(
            (
                "one winner among processes",
                lambda: _race(race_processes(store.url, _names(prefix, "process", keys), writers)),
            )
        )
    checks += [
        ("a listing shows every write and delete", lambda: _listing(store, f"{prefix}list/", listed)),
        ("keys are listed in order, after a key", lambda: _order(store, f"{prefix}order/")),
        ("a range is that range", lambda: _ranges(store, f"{prefix}ranges")),
        ("what is deleted is gone", lambda: _deletes(store, f"{prefix}deleted/", keys)),
        (
            "an overwrite shows whole, and at once",
            lambda: _overwrites(store, f"{prefix}overwritten", OVERWRITES_PER_KEY * keys),
        ),
    ]
    # As in the probe: a store that does not answer fails here, before the clean-up would wait for it a second time.
    store.list(prefix)
    with ExitStack() as cleanup:
        cleanup.callback(_clean, store, prefix, _missing_folders(store))
        for name, check in checks:
            yield _finding(name, check)
        yield _finding("nothing is left behind", lambda: _remove_all(store, prefix))


def _finding(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, check())
    except StoreUnfit as error:
        return Finding(name, "", str(error))
    except ObjectMissing as error:
        return Finding(name, "", f"{error}, although its write was answered")


def _names(prefix: str, kind: str, count: int) -> list[str]:
    return [f"{prefix}{kind}/{number:06d}" for number in range(count)]


def _probe(store: ObjectStore) -> str:
    probe(store)
    return "1 key"


def _race(race: Race) -> str:
    faults = race.faults()
    if faults:
        raise StoreUnfit(f"{len(faults)} of {len(race.keys)} keys went wrong; the first: {faults[0]}")
    return (
        f"{len(race.attempts)} writers, {len(race.keys)} keys, {race.creates()} creates, {len(race.keys)} winners, "
        f"0 torn or foreign bodies"
    )


def _listing(store: ObjectStore, prefix: str, count: int) -> str:
    names = _names(prefix, "many", count)
    _each(names, lambda key: store.put(key, b"x"))
    if store.list(prefix) != names:
        missing = len(set(names) - set(store.list(prefix)))
        raise StoreUnfit(f"a listing right after {count} writes lacks {missing} keys, or is not in order")
    few = _names(prefix, "one", 20)
    for number, key in enumerate(few, start=1):
        store.create(key, b"x")
        if store.list(f"{prefix}one/") != few[:number]:
            raise StoreUnfit(f"a listing right after the {number}. write does not show it")
    for number, key in enumerate(few, start=1):
        store.delete(key)
        if store.list(f"{prefix}one/") != few[number:]:
            raise StoreUnfit(f"a listing right after the {number}. delete still shows it")
    return f"{count} keys in one listing, {2 * len(few)} listings after one write or delete each, 0 stale"


def _order(store: ObjectStore, prefix: str) -> str:
    names = [f"{prefix}{name}" for name in ORDERED]
    for name in reversed(names):
        store.put(name, b"x")
    for number, after in enumerate(["", *names]):
        if store.list(prefix, after) != names[number:]:
            raise StoreUnfit(f"listing after {after!r} gives {store.list(prefix, after)}, not {names[number:]}")
    return f"{len(names) + 1} listings of {len(names)} keys"


def _ranges(store: ObjectStore, key: str) -> str:
    body = bytes(range(256)) * 300
    store.put(key, body)
    edges = (0, 1, 4095, 4096, 70_000, len(body) - 1, len(body), len(body) + 9)
    ranges = [(start, end) for start in edges for end in edges if start <= end]
    for start, end in ranges:
        if store.get(key, start, end) != body[start:end]:
            raise StoreUnfit(f"reading bytes [{start}, {end}) of {len(body)} gives others")
    return f"{len(ranges)} ranges of {len(body)} bytes"


def _deletes(store: ObjectStore, prefix: str, count: int) -> str:
    names = _names(prefix, "key", count)
    for key in names:
        store.create(key, b"before")
        store.delete(key)
        with suppress(ObjectMissing):
            store.get(key)
            raise StoreUnfit(f"{key!r} can still be read right after it was deleted")
        if not store.create(key, b"after") or store.get(key) != b"after":
            raise StoreUnfit(f"{key!r} cannot be created again right after it was deleted")
    return f"{count} keys deleted, found missing, and created again"


def _overwrites(store: ObjectStore, key: str, count: int) -> str:
    """A read must give a whole version, at least as new as the last answered write, and already begun."""
    begun, answered = 0, 0
    reads = [0] * READERS
    stop = threading.Event()

    def body(version: int) -> bytes:
        line = f"{version:08d}\n".encode()
        return line * (VERSION_BYTES // len(line) * (1 + version % 3))

    def read(reader: int) -> None:
        while not stop.is_set():
            oldest = answered
            seen = store.get(key)
            version = int(seen[:8]) if seen[:8].isdigit() else -1
            if seen != body(version):
                raise StoreUnfit(f"a read during an overwrite gives a torn body of {len(seen)} bytes")
            if not oldest <= version <= begun:
                raise StoreUnfit(f"a read gives version {version}, although version {oldest} had been written")
            reads[reader] += 1

    store.put(key, body(0))
    with ThreadPoolExecutor(READERS) as pool:
        readers = [pool.submit(read, reader) for reader in range(READERS)]
        try:
            while answered < count and not any(reader.done() for reader in readers):
                begun += 1
                store.put(key, body(begun))
                answered = begun
                # Of the next two reads that a reader ends, the second one began after the answer.
                enough = [made + 2 for made in reads]
                while any(map(operator.lt, reads, enough)) and not any(reader.done() for reader in readers):
                    time.sleep(POLL_INTERVAL_S)
        finally:
            stop.set()
        for reader in readers:
            reader.result()
    return f"{answered} overwrites, {sum(reads)} reads, 0 torn, 0 stale"


def _each(keys: Sequence[str], action: Callable[[str], object]) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        try:
            list(pool.map(action, keys))
        finally:
            pool.shutdown(cancel_futures=True)


def _remove_all(store: ObjectStore, prefix: str) -> str:
    names = store.list(prefix)
    _each(names, store.delete)
    left = store.list(prefix)
    if left:
        raise StoreUnfit(f"{len(left)} deleted objects are still there, {left[0]!r} among them")
    return f"{len(names)} objects deleted"


def _missing_folders(store: ObjectStore) -> list[Path]:
    """The directories that a local store will make, innermost first."""
    if not isinstance(store, LocalStore):
        return []
    root = Path(store.url)
    return [folder for folder in (root, *root.parents) if not folder.exists()]


def _clean(store: ObjectStore, prefix: str, folders: Sequence[Path]) -> None:
    with suppress(StorageError):
        _remove_all(store, prefix)
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def probe(store: ObjectStore) -> None:
    """Create, read, list and delete one small object with a random name below `layout.PROBE`.

    Raises StoreUnfit with the missing property, and StoreDenied or StoreUnavailable for a store without any use.
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
