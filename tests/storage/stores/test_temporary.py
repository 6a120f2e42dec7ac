"""What killed writers and deletes leave in a directory, and who removes it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage.stores.local import ABANDONED_S, LocalStore, temporary_name

# Writes a temporary file like one of a body of which half is written, and waits to be killed.
WRITER = """
import sys, time
from pathlib import Path
from storage.stores.local import temporary_name
(Path(sys.argv[1]) / temporary_name()).write_bytes(b"half of")
print("written", flush=True)
time.sleep(60)
"""

CHURN = """
import sys
from pathlib import Path
from storage.stores.local import LocalStore
store, name = LocalStore(Path(sys.argv[1]), fsync=False), sys.argv[2]
for number in range(300):
    key = f"a/b/c/{name}"
    assert store.create(key, b"x"), number
    assert store.get(key) == b"x"
    assert key in store.list("a/")
    store.put(key, b"y")
    store.delete(key)
    store.list("")
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run", fsync=False)


@pytest.fixture
def folder(store: LocalStore) -> Path:
    """A folder with one object."""
    store.put("a/b", b"1")
    return Path(store.url) / "a"


def write_and_die(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        assert len(names(folder)) == 2
        LocalStore(folder.parent).list("")
        assert len(names(folder)) == 2, "a living writer keeps its file"
        writer.send_signal(signal.SIGKILL)


def test_a_listing_removes_what_a_dead_writer_left(store, folder):
    write_and_die(folder)
    assert len(names(folder)) == 2
    assert store.list("") == ["a/b"]
    assert names(folder) == ["b"]


def test_a_delete_removes_it_with_the_folder(store, folder):
    write_and_die(folder)
    store.delete("a/b")
    assert names(Path(store.url)) == []


def test_a_writer_that_was_not_buried_is_dead_too(store, folder):
    """A zombie still has its number."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
    store.list("")
    assert names(folder) == ["b"]
    writer.communicate()


@pytest.mark.parametrize("name", [".tmp-0123456789abcdef-1-" + 32 * "0", ".tmp-" + 32 * "0"])
def test_of_other_machines_only_age_tells(store, folder, name):
    left = folder / name
    left.write_bytes(b"half of")
    now_s = time.time()
    for age_s, stays in ((0, True), (ABANDONED_S - 60, True), (ABANDONED_S + 60, False)):
        os.utime(left, (now_s - age_s, now_s - age_s))
        assert store.list("") == ["a/b"]
        assert left.exists() is stays, age_s


def test_a_delete_leaves_the_folder_to_a_living_writer(store, folder):
    (folder / temporary_name()).write_bytes(b"half of")
    store.delete("a/b")
    assert len(names(folder)) == 1


def test_a_writer_whose_file_was_taken_fails_and_leaves_nothing_torn(store, monkeypatch):
    """Whoever is slower than a day is told that it did not write; that is all."""
    link = os.link

    def swept_before(source: Path, target: Path) -> None:
        source.unlink()
        link(source, target)

    monkeypatch.setattr(os, "link", swept_before)
    with pytest.raises(TimeoutError, match="cannot create 'a/b'"):
        store.create("a/b", b"1")
    assert store.list("") == []


def test_folders_without_objects_go_with_their_last_object(store):
    for key in ("a/b/c/1", "a/b/2", "d"):
        store.put(key, b"x")
    root = Path(store.url)
    store.delete("a/b/c/1")
    assert names(root) == ["2", "a", "b", "d"]
    store.delete("a/b/2")
    assert names(root) == ["d"]
    store.delete("d")
    assert root.exists(), "the root is the user's"
    assert store.create("a/b/c/1", b"x")


@pytest.mark.slow
def test_deletes_and_creates_in_the_same_folders_do_not_disturb_each_other(tmp_path):
    """Each process makes and empties the folders that the others are about to use."""
    command = [sys.executable, "-c", CHURN, str(tmp_path / "run")]
    racers = [subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE, text=True) for n in range(6)]
    for racer in racers:
        _, errors = racer.communicate(timeout=600)
        assert racer.returncode == 0, errors
    assert names(tmp_path) == ["run"]


@pytest.mark.slow
def test_threads_do_not_disturb_each_other_either(tmp_path):
    store = LocalStore(tmp_path / "run", fsync=True)
    failures: list[Exception] = []

    def churn(name: str) -> None:
        try:
            for _ in range(60):
                store.put(f"a/b/{name}", b"x")
                store.delete(f"a/b/{name}")
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert names(tmp_path) == ["run"]
