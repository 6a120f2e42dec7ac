"""Real file systems that are full or may only be read; skipped where this user may not mount one."""

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from storage.clock import SystemClock
from storage.journal.assembly import JournalReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.fitness import probe
from storage.records.run import read_plan
from storage.stores.connect import connect
from storage.stores.local import LocalStore
from storage.stores.store import ObjectMissing, StoreDenied, commit
from tasks.sampling.session.member import generate_slot
from tests.small_run import config, memory_store, model_directory, plan_iteration, roll_out

KIB = 1 << 10


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """disk(options) -> the folder of a file system in memory, mounted or mounted again with these options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        again = "remount," if folder.is_mount() else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{again}{options}", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("no mount on this machine")
        if done.returncode != 0:
            pytest.skip(f"this user may not mount a file system: {done.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_one_line_and_holds_only_whole_objects(disk):
    store = LocalStore(disk("size=256k"), refused_s_max=0.1)
    store.put("a", b"old" * KIB)
    for write in (
        lambda: store.create("b/new", bytes(300 * KIB)),
        lambda: store.put("a", bytes(300 * KIB)),
        lambda: commit(store, "c", bytes(300 * KIB)),
    ):
        with pytest.raises(StoreDenied, match=r"No space left on device; free some space there") as caught:
            write()
        assert "\n" not in str(caught.value)
    assert store.list("") == ["a"]
    assert store.get("a") == b"old" * KIB
    with pytest.raises(ObjectMissing):
        store.get("b/new")
    assert not list(Path(store.url).rglob(".tmp-*"))
    assert store.create("b/new", bytes(100 * KIB))


def test_a_read_only_file_system_is_one_line_and_can_be_read(disk):
    folder = disk("size=256k")
    LocalStore(folder).put("a", b"1")
    store = LocalStore(disk("ro"))
    for write in (
        lambda: store.create("b", b"x"),
        lambda: store.create("c/d", b"x"),
        lambda: store.put("a", b"x"),
        lambda: store.delete("a"),
        lambda: probe(store),
    ):
        with pytest.raises(StoreDenied, match=r"Read-only file system; this user must be able to") as caught:
            write()
        assert "\n" not in str(caught.value)
    assert store.list("") == ["a"]
    assert store.get("a") == b"1"


@pytest.mark.slow
def test_a_member_on_a_full_disk_stops_and_its_successor_ends_with_the_same_tokens(disk, tmp_path, monkeypatch):
    """Nothing half-written is trusted: what the journal holds is continued, token by token."""
    monkeypatch.setattr("storage.stores.connect.LocalStore", partial(LocalStore, refused_s_max=0.1))
    urls = _two_runs(disk, tmp_path)
    with pytest.raises(StoreDenied, match="No space left on device; free some space"):
        generate_slot(urls[1], 0, 0, lambda: False, SystemClock())
    (Path(urls[1]) / "ballast").unlink()
    roll_out(urls[1], 0)
    assert _tokens(urls[1]) == _tokens(urls[0])


@pytest.mark.slow
def test_a_member_outlives_a_disk_that_is_full_for_seconds_and_loses_no_token(disk, tmp_path):
    urls = _two_runs(disk, tmp_path)
    freed = threading.Timer(3.0, (Path(urls[1]) / "ballast").unlink)
    freed.start()
    for slot in (0, 1):
        generate_slot(urls[1], 0, slot, lambda: False, SystemClock())
        assert freed.finished.is_set(), "the member did not need what was freed"
    freed.join()
    assert _tokens(urls[1]) == _tokens(urls[0])
    written = [each.incarnation for each in _lives(urls[1])]
    assert len(written) == 2, "each slot had one life"


def _two_runs(disk: Callable[[str], Path], tmp_path: Path) -> tuple[str, str]:
    """A run that has generated, and its like on a disk that is full but for some KiB."""
    model = model_directory(tmp_path / "model")
    urls = ("memory://full", str(disk("size=64m")))
    memory_store("full")
    for url in urls:
        plan_iteration(config(url, model, sampling={"max_completion_length": 200}))
    roll_out(urls[0], 0)
    _fill(Path(urls[1]), leave=12 * KIB)
    return urls


def _lives(url: str) -> list[HeartbeatRecord]:
    store = connect(url)
    return [records.read(store, HeartbeatRecord, key) for key in store.list(layout.alive_all(0))]


def _fill(folder: Path, leave: int) -> None:
    with (folder / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - leave)


def _tokens(url: str) -> list[list[int]]:
    store = connect(url)
    plan = read_plan(store, 0)
    reader = JournalReader(store, plan)
    reader.refresh()
    return [reader.assemble(response).token_ids.tolist() for response in range(plan.num_responses)]
