import errno
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing, StoreDenied, StoreUnavailable, StoreUnfit
from storage.testing import StoreContract

RACER = """
import sys
from pathlib import Path
from storage.stores.local import LocalStore
store, name = LocalStore(Path(sys.argv[1]), fsync=False), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
body = name.encode() * 20_000
for number in range(100):
    key = f"race/{number:03d}"
    won = store.create(key, body)
    read = store.get(key)
    assert len(read) == 20_000 * len(name) and len(set(read)) == 1, f"torn: {key}"
    assert not won or read == body
    if won:
        print(key)
"""

UNPRIVILEGED = """
import os, sys
from pathlib import Path
from storage.stores.local import LocalStore
from storage.stores.store import StoreDenied
os.chmod(sys.argv[1], 0o555)
if os.getuid() == 0:
    os.setuid(65534)
for write in (lambda store: store.create("a", b"x"), lambda store: store.put("b/c", b"x")):
    try:
        write(LocalStore(Path(sys.argv[1])))
    except StoreDenied as error:
        print(error)
"""

LIMITED = """
import resource, sys
from pathlib import Path
from storage.stores.local import LocalStore
from storage.stores.store import StoreDenied
store = LocalStore(Path(sys.argv[1]))
store.put("kept", b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
for write in (lambda: store.create("new", b"x" * 100_000), lambda: store.put("kept", b"x" * 100_000)):
    try:
        write()
    except StoreDenied as error:
        print(error)
"""


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.slow
class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "run", fsync=False)


class TestSyncedLocalStore(StoreContract):
    races = 10
    many_keys = 50
    overwrites = 30

    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "deep" / "run")


class Comparison(RuleBasedStateMachine):
    """The same calls on a directory and on the model give the same answers."""

    # No key is a folder of another one: a directory cannot hold both, which has a test of its own.
    keys = st.sampled_from(["a/x", "a/y", "a.b", "b/c/d", "b/c/e", "b.c", "z"])
    bodies = st.binary(min_size=1, max_size=30)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = LocalStore(Path(self.folder.name), fsync=False)
        self.model = MemoryStore()

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(key=keys, body=bodies)
    def create(self, key, body):
        assert self.store.create(key, body) == self.model.create(key, body)

    @rule(key=keys, body=st.binary(max_size=30))
    def put(self, key, body):
        self.store.put(key, body)
        self.model.put(key, body)

    @rule(key=keys, start=st.integers(0, 40), length=st.none() | st.integers(0, 40))
    def get(self, key, start, length):
        end = None if length is None else start + length
        try:
            expected = self.model.get(key, start, end)
        except ObjectMissing:
            with pytest.raises(ObjectMissing):
                self.store.get(key, start, end)
        else:
            assert self.store.get(key, start, end) == expected

    @rule(prefix=st.sampled_from(["", "a", "a/", "b", "b/", "b/c", "b/c/", "b.", "q/"]), after=st.just("") | keys)
    def list(self, prefix, after):
        assert self.store.list(prefix, after) == self.model.list(prefix, after)

    @rule(key=keys)
    def delete(self, key):
        self.store.delete(key)
        self.model.delete(key)


TestComparison = Comparison.TestCase
TestComparison.pytestmark = [pytest.mark.slow]
TestComparison.settings = settings(stateful_step_count=30)


@pytest.mark.slow
def test_of_racing_processes_exactly_one_wins_each_key(tmp_path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    wins: Counter[str] = Counter()
    for racer in racers:
        output, errors = racer.communicate(timeout=600)
        assert racer.returncode == 0, errors
        wins.update(output.split())
    assert wins == {f"race/{number:03d}": 1 for number in range(100)}
    assert len(files_in(tmp_path)) == 100


def test_a_full_disk_is_one_clear_line_and_leaves_no_torn_object(tmp_path):
    lines = run_python(LIMITED, str(tmp_path)).splitlines()
    assert len(lines) == 2
    assert "'new'" in lines[0]
    assert str(tmp_path) in lines[0]
    assert "'kept'" in lines[1]
    assert files_in(tmp_path) == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (errno.ENOSPC, StoreDenied, "free some space"),
        (errno.EDQUOT, StoreDenied, "free some space"),
        (errno.EROFS, StoreDenied, "must be able to read and write"),
        (errno.EIO, StoreUnavailable, "Input/output error"),
    ],
)
def test_what_the_system_says_becomes_a_store_error(tmp_path, monkeypatch, code, kind, advice):
    def refuse(_descriptor, _body):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(kind, match=advice) as caught:
        LocalStore(tmp_path).create("a", b"x")
    monkeypatch.undo()
    assert "\n" not in str(caught.value)
    assert files_in(tmp_path) == []


def test_a_read_only_directory_is_denied(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir()
    lines = run_python(UNPRIVILEGED, str(folder)).splitlines()
    assert len(lines) == 2
    assert all("must be able to read and write that directory" in line and str(folder) in line for line in lines)


def test_a_file_system_without_hard_links_is_unfit(tmp_path, monkeypatch):
    def refuse(_source, _target):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreUnfit, match="no hard links"):
        LocalStore(tmp_path).create("a", b"x")
    assert files_in(tmp_path) == []


def test_a_directory_cannot_hold_an_object_and_keys_below_it(tmp_path):
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    store.put("c", b"1")
    for write in (
        lambda: store.create("a", b"2"),
        lambda: store.put("a", b"2"),
        lambda: store.create("c/d", b"2"),
        lambda: store.put("c/d", b"2"),
    ):
        with pytest.raises(StoreDenied, match="want the same name"):
            write()
    assert files_in(tmp_path) == ["a/b", "c"]


def test_a_root_that_is_a_file_is_denied(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreDenied, match=r"'a' in .*file"):
        LocalStore(tmp_path / "file").create("a", b"x")


@pytest.mark.parametrize("root", ["file", "file/run"])
def test_nothing_is_missing_where_a_file_is_in_the_way(tmp_path, root):
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / root)
    for read in (lambda: store.get("a"), lambda: store.get_into("a", 0, memoryview(bytearray(1)))):
        with pytest.raises(StoreDenied, match=r"cannot get 'a' in .*file"):
            read()


def test_files_left_by_a_kill_are_no_objects(tmp_path):
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    (tmp_path / "a" / ".tmp-0123").write_bytes(b"half of")
    assert store.list("") == ["a/b"]
    assert store.list("a/.") == []
    with pytest.raises(ValueError, match="temporary"):
        store.get("a/.tmp-0123")


def test_a_folder_removed_meanwhile_is_made_again(tmp_path):
    store = LocalStore(tmp_path / "run")
    store.put("a/b", b"1")
    (tmp_path / "run" / "a" / "b").unlink()
    (tmp_path / "run" / "a").rmdir()
    assert store.list("a/") == []
    assert store.create("a/b", b"2")


def test_files_that_nfs_keeps_for_others_are_no_objects(tmp_path):
    """An NFS client renames what is deleted while somebody reads it."""
    store = LocalStore(tmp_path, fsync=False)
    store.put("alive/00000-a.json", b"1")
    left = tmp_path / "alive" / ".nfs000000000123abcd00000001"
    left.write_bytes(b"1")
    assert store.list("") == store.list("alive/") == ["alive/00000-a.json"]
    store.delete("alive/00000-a.json")
    assert store.list("") == []
    assert left.exists(), "it goes with its last reader"
    for write in (store.create, store.put):
        with pytest.raises(ValueError, match=r"not a storage key: 'a/\.nfs0' \(parts beginning '\.tmp-' or '\.nfs'"):
            write("a/.nfs0", b"x")


def test_nothing_is_made_before_the_first_write(tmp_path):
    store = LocalStore(tmp_path / "run")
    assert store.list("") == []
    with pytest.raises(ObjectMissing):
        store.get("a")
    store.delete("a")
    assert list(tmp_path.iterdir()) == []


def test_the_url_is_absolute_and_leads_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = LocalStore(Path("run"))
    store.put("a", b"1")
    monkeypatch.chdir("/")
    assert LocalStore(Path(store.url)).get("a") == b"1"
    assert store.url == str(tmp_path / "run")
