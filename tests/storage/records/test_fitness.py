import time
import uuid

import pytest

from storage.records.fitness import Finding, prove
from storage.stores.connect import connect
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectStore, StoreDenied
from tests.storage.stores.test_probe import (
    IgnoringAfter,
    IgnoringRanges,
    KeepingWhatIsDeleted,
    NotReadingItsWrites,
    Overwriting,
    Stale,
    Unconditional,
)
from tests.storage.stores.test_race import CheckThenAct

THREADS, PROCESSES = "one winner among threads", "one winner among processes"
LISTING, ORDER = "a listing shows every write and delete", "keys are listed in order, after a key"
WHOLE = "an overwrite shows whole, and at once"


class Torn(MemoryStore):
    """Overwrites in two steps."""

    def put(self, key: str, body: bytes) -> None:
        super().put(key, body[: len(body) // 2])
        time.sleep(0.005)
        super().put(key, body)


class Behind(MemoryStore):
    """Reads what was overwritten two writes ago."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[bytes] = []

    def put(self, key: str, body: bytes) -> None:
        super().put(key, body)
        if key.endswith("overwritten"):
            self._copies.append(body)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._copies[-3] if len(self._copies) > 3 else super().get(key, start, end)


class Unordered(MemoryStore):
    def list(self, prefix: str, after: str = "") -> list[str]:
        return sorted(super().list(prefix, after), key=len)


class Lagging(MemoryStore):
    """Shows in a listing what was written before the last write."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""

    def create(self, key: str, body: bytes) -> bool:
        self._last = key
        return super().create(key, body)

    def list(self, prefix: str, after: str = "") -> list[str]:
        return [key for key in super().list(prefix, after) if key != self._last or prefix == "probe/"]


def findings(store: ObjectStore, keys: int = 8) -> list[Finding]:
    return list(prove(store, keys=keys, listed=60))


def lacking(store: ObjectStore) -> set[str]:
    return {finding.name for finding in findings(store) if finding.lack}


@pytest.mark.slow
def test_a_sound_store_is_fit_and_left_empty():
    store = MemoryStore()
    found = findings(store)
    assert [finding.lack for finding in found] == [None] * len(found)
    assert "16 writers, 8 keys, 128 creates, 8 winners" in found[1].shown
    assert store.list("") == []


@pytest.mark.slow
def test_a_directory_is_raced_for_by_processes_and_its_run_is_not_touched(tmp_path):
    store = LocalStore(tmp_path)
    store.put("run.json", b"{}")
    found = findings(store)
    assert [finding.lack for finding in found] == [None] * len(found)
    assert PROCESSES in {finding.name for finding in found}
    assert [path.name for path in tmp_path.rglob("*")] == ["run.json"]


@pytest.mark.slow
def test_folders_that_were_not_there_are_removed_again(tmp_path):
    assert lacking(LocalStore(tmp_path / "deep" / "run")) == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_moto_behind_a_lock_is_fit(s3_url):
    store = connect(f"{s3_url}/{uuid.uuid4().hex}")
    found = list(prove(store, keys=4, writers=4, listed=60))
    assert [finding.lack for finding in found] == [None] * len(found)
    assert store.list("") == []


def test_radosgw_is_fit(radosgw_url):
    store = connect(f"{radosgw_url}/{uuid.uuid4().hex}")
    found = list(prove(store, keys=10, writers=6))
    assert [finding.lack for finding in found] == [None] * len(found)
    assert store.list("") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        (Unconditional, {"a second create is refused", THREADS}),
        (Overwriting, {"a second create is refused", THREADS}),
        (CheckThenAct, {THREADS}),
        (Stale, {"a second create is refused", LISTING, ORDER}),
        (Lagging, {LISTING}),
        (Unordered, {ORDER}),
        (IgnoringAfter, {"a second create is refused", ORDER}),
        (IgnoringRanges, {"a second create is refused", "a range is that range"}),
        (Torn, {WHOLE}),
        (Behind, {WHOLE}),
        (
            KeepingWhatIsDeleted,
            {"a second create is refused", LISTING, "what is deleted is gone", "nothing is left behind"},
        ),
    ],
)
def test_what_a_store_lacks_is_found(kind, lacks):
    assert lacking(kind()) == lacks


def test_a_store_that_does_not_read_its_writes_is_not_fit():
    assert {THREADS, WHOLE} <= lacking(NotReadingItsWrites())


def test_a_store_that_refuses_says_so_itself():
    class Refusing(MemoryStore):
        def put(self, key: str, body: bytes) -> None:
            raise StoreDenied("refused")

    store = Refusing()
    with pytest.raises(StoreDenied, match="refused"):
        findings(store)
    assert store.list("") == []


def test_a_proof_that_is_not_read_to_its_end_leaves_nothing(tmp_path):
    proof = prove(LocalStore(tmp_path / "run"), keys=4)
    for _ in range(2):
        next(proof)
    assert (tmp_path / "run").exists()
    proof.close()
    assert list(tmp_path.iterdir()) == []
