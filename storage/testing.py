"""What every ObjectStore must do: tests for pytest that the author of a store inherits.

A test file subclasses StoreContract and supplies the fixture `store`, an empty store for each test. The class variables
say how thorough the tests are; a slow store lowers them.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from storage.records.fitness import probe
from storage.stores.store import ObjectMissing, ObjectStore, commit, read_into

THREADS = 16


def race(store: ObjectStore, keys: list[str]) -> dict[str, list[bytes]]:
    """Let 16 threads create every key at the same moment: the bodies that were told they won, by key."""
    winners: dict[str, list[bytes]] = {key: [] for key in keys}
    barrier = threading.Barrier(THREADS)

    def run(number: int) -> None:
        for key in keys:
            body = f"thread {number}".encode() * 100
            barrier.wait()
            if store.create(key, body):
                winners[key].append(body)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(run, number) for number in range(THREADS)]:
            future.result()
    return winners


class StoreContract:
    races: ClassVar[int] = 100
    many_keys: ClassVar[int] = 2500
    overwrites: ClassVar[int] = 200

    def test_what_was_created_is_read_back(self, store: ObjectStore) -> None:
        assert store.create("a/b.json", b"body") is True
        assert store.get("a/b.json") == b"body"

    def test_a_second_create_is_refused_and_changes_nothing(self, store: ObjectStore) -> None:
        assert store.create("a", b"first")
        assert store.create("a", b"second") is False
        assert store.create("a", b"first") is False
        assert store.get("a") == b"first"

    def test_create_refuses_what_put_wrote(self, store: ObjectStore) -> None:
        store.put("a", b"put")
        assert store.create("a", b"created") is False
        assert store.get("a") == b"put"

    def test_create_refuses_an_empty_body(self, store: ObjectStore) -> None:
        with pytest.raises(ValueError, match="empty"):
            store.create("a", b"")
        assert store.list("") == []

    def test_put_overwrites(self, store: ObjectStore) -> None:
        for body in (b"long body", b"short", b"", b"again"):
            store.put("a", body)
            assert store.get("a") == body
        assert store.list("") == ["a"]

    def test_a_deleted_key_can_be_created_again(self, store: ObjectStore) -> None:
        assert store.create("a/b", b"1")
        store.delete("a/b")
        with pytest.raises(ObjectMissing):
            store.get("a/b")
        assert store.list("a/") == []
        assert store.create("a/b", b"2")
        assert store.get("a/b") == b"2"

    def test_deleting_what_is_not_there_is_no_error(self, store: ObjectStore) -> None:
        store.put("a/b", b"1")
        for key in ("a/c", "x/y", "z", "a", "a/b/c"):
            store.delete(key)
        assert store.list("") == ["a/b"]

    def test_reading_what_is_not_there(self, store: ObjectStore) -> None:
        store.put("a/b", b"1")
        for key in ("x", "a", "a/b/c", "deep/down/there"):
            for start, end in ((0, None), (1, 2), (1, 1)):
                with pytest.raises(ObjectMissing, match=repr(key)) as caught:
                    store.get(key, start, end)
                assert caught.value.key == key

    def test_ranges_are_those_of_a_slice(self, store: ObjectStore) -> None:
        body = b"0123456789"
        store.put("a", body)
        for start in (0, 3, 9, 10, 99):
            for end in (None, start, start + 1, start + 4, 120):
                assert store.get("a", start, end) == body[start:end], (start, end)

    def test_a_range_is_read_into_its_place(self, store: ObjectStore) -> None:
        body = bytes(range(100))
        store.put("a/b", body)
        for start, length in ((0, 100), (3, 20), (90, 10), (90, 11), (100, 5), (200, 5), (7, 0)):
            buffer = bytearray(b"\xff" * 120)
            filled = read_into(store, "a/b", start, memoryview(buffer)[10 : 10 + length])
            assert filled == len(body[start : start + length])
            assert buffer == (b"\xff" * 10 + body[start : start + length]).ljust(120, b"\xff")
        for key in ("a/c", "a", "a/b/c"):
            with pytest.raises(ObjectMissing, match=repr(key)):
                read_into(store, key, 0, memoryview(bytearray(5)))
        with pytest.raises(ValueError, match="byte range"):
            read_into(store, "a/b", -1, memoryview(bytearray(5)))

    def test_ranges_of_an_empty_object(self, store: ObjectStore) -> None:
        store.put("a", b"")
        assert [store.get("a"), store.get("a", 0, 5), store.get("a", 3)] == [b"", b"", b""]

    def test_impossible_ranges(self, store: ObjectStore) -> None:
        store.put("a", b"0123")
        for start, end in ((-1, None), (-2, -1), (3, 2)):
            with pytest.raises(ValueError, match="byte range"):
                store.get("a", start, end)

    def test_bad_keys(self, store: ObjectStore) -> None:
        calls: list[Callable[[str], object]] = [
            lambda key: store.create(key, b"x"),
            lambda key: store.put(key, b"x"),
            store.get,
            store.delete,
        ]
        for key in (
            "",
            "/a",
            "a/",
            "a//b",
            "../a",
            "a/../b",
            ".",
            "a/.",
            "a b",
            "a\\b",
            "a\n",
            "é",
            "a?b",
            "a%41",
            "a*",
        ):
            for call in calls:
                with pytest.raises(ValueError, match="not a storage key"):
                    call(key)
        assert store.list("") == []

    def test_bad_prefixes(self, store: ObjectStore) -> None:
        for prefix in ("/", "../", "a/../", "a//", "a b", "//a", "é"):
            with pytest.raises(ValueError, match="not a "):
                store.list(prefix)

    def test_keys_are_listed_in_their_order_as_whole_strings(self, store: ObjectStore) -> None:
        keys = ["a", "a.b/c", "a-/x", "a0", "A", "b/10", "b/9", "b/9.x", "b/9-/y", "b0/1", "_", "z"]
        for key in keys:
            store.put(key, b"x")
        assert store.list("") == sorted(keys)

    def test_prefixes_need_not_end_with_a_part(self, store: ObjectStore) -> None:
        keys = ["run/a1/x", "run/a1.json", "run/a12", "run/b", "running", "ru"]
        for key in keys:
            store.put(key, b"x")
        for prefix in (
            "",
            "r",
            "run",
            "run/",
            "run/a",
            "run/a1",
            "run/a1/",
            "run/a1/x",
            "run/a1/x/",
            "none/",
            ".",
            "..",
        ):
            assert store.list(prefix) == sorted(key for key in keys if key.startswith(prefix)), prefix

    def test_after_excludes_itself_and_what_sorts_before(self, store: ObjectStore) -> None:
        keys = ["a/1/x", "a/1/y", "a/1.5", "a/2/x", "a/3", "b/1"]
        for key in keys:
            store.put(key, b"x")
        for prefix in ("", "a/", "a/1", "a/1/"):
            for after in (
                "",
                "a",
                "a/1",
                "a/1/",
                "a/1/x",
                "a/1/xx",
                "a/1/z",
                "a/1.5",
                "a/2",
                "a/3",
                "a/4",
                "b/1",
                "zz",
            ):
                expected = sorted(key for key in keys if key.startswith(prefix) and key > after)
                assert store.list(prefix, after) == expected, (prefix, after)

    def test_a_listing_shows_every_write_and_delete_at_once(self, store: ObjectStore) -> None:
        for number in range(20):
            store.create(f"c/{number:03d}", b"x")
            assert len(store.list("c/")) == number + 1
        for number in range(20):
            store.delete(f"c/{number:03d}")
            assert len(store.list("c/")) == 19 - number

    def test_listings_are_complete_beyond_one_page(self, store: ObjectStore) -> None:
        keys = [f"many/{number:06d}" for number in range(self.many_keys)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b"x"), keys))
        assert store.list("many/") == keys
        assert store.list("many/", after=keys[-3]) == keys[-2:]
        assert store.list("many/", after=keys[2]) == keys[3:]

    def test_a_big_body(self, store: ObjectStore) -> None:
        body = os.urandom(9 << 20)
        assert store.create("big", body)
        assert store.get("big") == body
        assert store.get("big", (8 << 20) - 5, (8 << 20) + 5) == body[(8 << 20) - 5 : (8 << 20) + 5]

    def test_a_body_is_copied(self, store: ObjectStore) -> None:
        body = bytearray(b"before")
        store.put("a", bytes(body))
        view = store.get("a")
        body[:] = b"after!"
        store.put("a", bytes(body))
        assert (view, store.get("a")) == (b"before", b"after!")

    def test_of_racing_creators_exactly_one_wins_and_its_bytes_are_stored(self, store: ObjectStore) -> None:
        winners = race(store, [f"race/{number:04d}" for number in range(self.races)])
        for key, bodies in winners.items():
            assert len(bodies) == 1, key
            assert store.get(key) == bodies[0], key

    def test_an_overwritten_object_is_never_torn(self, store: ObjectStore) -> None:
        bodies = [bytes([number]) * (20_000 + 10_000 * number) for number in range(4)]
        store.put("torn", bodies[0])

        counts = {"reads": 0, "writes": 0}

        def enough() -> bool:
            return min(counts.values()) >= self.overwrites

        def read() -> None:
            try:
                while not enough():
                    assert store.get("torn") in bodies
                    counts["reads"] += 1
            finally:
                counts["reads"] += self.overwrites

        def overwrite() -> None:
            try:
                while not enough():
                    store.put("torn", bodies[counts["writes"] % 4])
                    counts["writes"] += 1
            finally:
                counts["writes"] += self.overwrites

        with ThreadPoolExecutor(3) as pool:
            for future in [pool.submit(run) for run in (read, read, overwrite)]:
                future.result()

    def test_commit_tells_ones_own_object_from_anothers(self, store: ObjectStore) -> None:
        assert commit(store, "a", b"mine, nonce 1") is True
        assert commit(store, "a", b"mine, nonce 1") is True
        assert commit(store, "a", b"theirs, nonce 2") is False
        assert store.get("a") == b"mine, nonce 1"

    def test_the_probe_accepts_the_store_and_leaves_nothing(self, store: ObjectStore) -> None:
        probe(store)
        assert store.list("") == []

    def test_it_is_an_object_store(self, store: ObjectStore) -> None:
        assert isinstance(store, ObjectStore)
