import pytest

from storage.records.fitness import probe
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing, StoreDenied, StoreUnavailable, StoreUnfit


class Unconditional(MemoryStore):
    """Like servers that do not know the condition: every create succeeds and overwrites."""

    def create(self, key: str, body: bytes) -> bool:
        self.put(key, body)
        return True


class Overwriting(MemoryStore):
    """Says that the object exists, and overwrites it all the same."""

    def create(self, key: str, body: bytes) -> bool:
        created = super().create(key, body)
        self.put(key, body)
        return created


class Stale(MemoryStore):
    """Answers listings from a cache."""

    def list(self, prefix: str, after: str = "") -> list[str]:
        return []


class NotReadingItsWrites(MemoryStore):
    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        raise ObjectMissing(key)


class IgnoringRanges(MemoryStore):
    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return super().get(key)


class IgnoringAfter(MemoryStore):
    def list(self, prefix: str, after: str = "") -> list[str]:
        return super().list(prefix)


class KeepingWhatIsDeleted(MemoryStore):
    def delete(self, key: str) -> None:
        pass


class Lossy(MemoryStore):
    """Loses the answer of the first create."""

    lost = False

    def create(self, key: str, body: bytes) -> bool:
        created = super().create(key, body)
        if not self.lost:
            self.lost = True
            raise StoreUnavailable("no answer")
        return created


class Denied(MemoryStore):
    def create(self, key: str, body: bytes) -> bool:
        raise StoreDenied("refused")

    def delete(self, key: str) -> None:
        raise StoreDenied("refused too")


@pytest.mark.parametrize(
    ("kind", "lack"),
    [
        (Unconditional, "condition of an atomic create is ignored"),
        (Overwriting, "a refused create has changed the object"),
        (Stale, "not listed right after"),
        (NotReadingItsWrites, "cannot be read right after"),
        (IgnoringRanges, "range of bytes"),
        (IgnoringAfter, "listing after a key"),
        (KeepingWhatIsDeleted, "deleted object is still listed"),
    ],
)
def test_what_a_store_lacks_is_named(kind, lack):
    store = kind("bad")
    with pytest.raises(StoreUnfit, match=f"memory://bad cannot hold a run: .*{lack}"):
        probe(store)


@pytest.mark.parametrize("kind", [Unconditional, Overwriting, IgnoringRanges, IgnoringAfter])
def test_an_unfit_store_is_left_clean(kind):
    store = kind("bad")
    with pytest.raises(StoreUnfit):
        probe(store)
    assert store.list("") == []


def test_a_lost_answer_is_no_lack():
    store = Lossy("slow")
    probe(store)
    assert store.lost
    assert store.list("") == []


def test_a_store_that_refuses_says_so_itself():
    with pytest.raises(StoreDenied, match=r"^refused$"):
        probe(Denied("no"))
