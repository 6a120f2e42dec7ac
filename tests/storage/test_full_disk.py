"""Real file systems that are full or may only be read; skipped where this user may not mount one."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.assembly import JournalReader
from storage.clock import SystemClock
from storage.connect import connect
from storage.fitness import probe
from storage.local import LocalStore
from storage.run import read_plan
from storage.store import ObjectMissing, StoreDenied, commit
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
    store = LocalStore(disk("size=256k"))
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
def test_a_worker_on_a_full_disk_stops_and_its_successor_ends_with_the_same_tokens(disk, tmp_path):
    """Nothing half-written is trusted: what the journal holds is continued, token by token."""
    model = model_directory(tmp_path / "model")
    urls = ("memory://full", str(disk("size=64m")))
    memory_store("full")
    for url in urls:
        plan_iteration(config(url, model, sampling={"max_completion_length": 200}))
    roll_out(urls[0], 0)
    _fill(Path(urls[1]), leave=12 * KIB)
    with pytest.raises(StoreDenied, match="No space left on device; free some space"):
        generate_slot(urls[1], 0, 0, lambda: False, SystemClock())
    (Path(urls[1]) / "ballast").unlink()
    roll_out(urls[1], 0)
    assert _tokens(urls[1]) == _tokens(urls[0])


def _fill(folder: Path, leave: int) -> None:
    with (folder / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - leave)


def _tokens(url: str) -> list[list[int]]:
    store = connect(url)
    plan = read_plan(store, 0)
    reader = JournalReader(store, plan)
    reader.refresh()
    return [reader.assemble(response).token_ids.tolist() for response in range(plan.num_responses)]
