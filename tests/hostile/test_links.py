"""Links and devices inside a run's directory: no verb of the store follows one, and a sweep deletes nothing behind it.

To add a case, add a line to OBSTACLES: where it lies in the run, and how it is made there.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout
from storage.stores.local import LocalStore
from storage.stores.store import ObjectStore, StoreDenied
from tests.committed_runs import run_of

VICTIM = "victim"
CHECKPOINT = "checkpoints/00000001"

Make = Callable[[Path, Path], None]  # (the path in the run, a folder outside the run that holds `kept/object`)
Verb = Callable[[ObjectStore, str], object]


def link_to_folder(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def link_to_file(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "kept" / "object")


def link_to_nothing(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "absent")


def link_to_itself(path: Path, _victim: Path) -> None:
    path.symlink_to(path)


def link_upwards(path: Path, _victim: Path) -> None:
    path.symlink_to("../..")


def pipe(path: Path, _victim: Path) -> None:
    os.mkfifo(path)


OBSTACLES: list[tuple[str, Make]] = [
    (f"{CHECKPOINT}/old", link_to_folder),
    (f"{CHECKPOINT}/manifest.json", link_to_folder),
    (f"{CHECKPOINT}/manifest.json", link_to_file),
    (f"{CHECKPOINT}/manifest.json", pipe),
    (f"{CHECKPOINT}/loop", link_to_itself),
    (f"{CHECKPOINT}/up", link_upwards),
    ("checkpoints/00000000", link_to_folder),
    ("checkpoints/00000000", link_to_nothing),
    ("weights/00000001/critic", link_to_folder),
    ("iterations/000000/journal/old", link_to_folder),
    ("iterations/000000/journal/old.arrow", link_to_file),
    ("iterations/000000/alive/old.json", pipe),
    ("iterations/000000/claims/00007", link_to_folder),
    ("lengths/000000.safetensors", link_to_file),
    ("evaluations/00000000-0a", link_to_folder),
]
NAMES = [f"{path}-{make.__name__}" for path, make in OBSTACLES]

VERBS: dict[str, Verb] = {
    "get": lambda store, key: store.get(key),
    "get a range": lambda store, key: store.get(key, 0, 1),
    "get_into": lambda store, key: store.get_into(key, 0, memoryview(bytearray(1))),
    "put": lambda store, key: store.put(key, b"x"),
    "create": lambda store, key: store.create(key, b"x"),
    "delete": lambda store, key: store.delete(key),
    "list": lambda store, key: store.list(f"{key}/"),
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / VICTIM
    (folder / "kept").mkdir(parents=True)
    (folder / "kept" / "object").write_bytes(b"not the run's")
    return folder


def place(run: Path, at: str, make: Make, victim: Path) -> Path:
    path = run / at
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    make(path, victim)
    return path


def unharmed(victim: Path) -> bool:
    files = [path for path in victim.rglob("*") if path.is_file()]
    return [(path.name, path.read_bytes()) for path in files] == [("object", b"not the run's")]


@pytest.mark.parametrize(("at", "make"), OBSTACLES, ids=NAMES)
def test_a_sweep_deletes_nothing_behind_it(tmp_path: Path, victim: Path, at: str, make: Make):
    store = LocalStore(tmp_path / "run", fsync=False)
    run_of(store, 4)
    path = place(tmp_path / "run", at, make, victim)
    sweep(store, RetentionConfig(keep_checkpoints=1, keep_weights=1))
    assert unharmed(victim)
    assert os.path.lexists(path)
    assert not [key for key in store.list("") if key == at or key.startswith(f"{at}/")]
    assert layout.manifest(layout.checkpoint(4)) in store.list(layout.CHECKPOINTS)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("below", ["", "/kept", "/kept/object", "/kept/new"])
@pytest.mark.parametrize("make", dict.fromkeys(make for _, make in OBSTACLES))
def test_no_verb_follows_it(tmp_path: Path, victim: Path, make: Make, below: str, verb: str):
    store = LocalStore(tmp_path / "run", fsync=False)
    path = place(tmp_path / "run", "a/b", make, victim)
    with pytest.raises(StoreDenied, match=r"a/b is a link or a device; Gleaner follows none inside a run; remove it"):
        VERBS[verb](store, f"a/b{below}")
    assert unharmed(victim)
    assert os.path.lexists(path)


def test_the_run_itself_may_lie_behind_a_link(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    store = LocalStore(tmp_path / "run", fsync=False)
    store.put("a/b", b"x")
    assert (store.list(""), store.get("a/b")) == (["a/b"], b"x")
    store.delete("a/b")
    assert store.list("") == []
