"""commit() when answers are lost, refused or never come."""

import pytest

from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing, StorageError, StoreDenied, StoreUnavailable, check_key, commit


class LosingStore(MemoryStore):
    """Applies the first creates, or does not, and answers none of them."""

    def __init__(self, answers_lost: int, *, applied: bool) -> None:
        super().__init__()
        self.answers_lost = answers_lost
        self.applied = applied

    def create(self, key: str, body: bytes) -> bool:
        if self.answers_lost == 0:
            return super().create(key, body)
        self.answers_lost -= 1
        if self.applied:
            super().create(key, body)
        raise StoreUnavailable("no answer")


class RetryingStore(MemoryStore):
    """Like a client that repeats a create whose answer it lost: it meets its own object."""

    def create(self, key: str, body: bytes) -> bool:
        super().create(key, body)
        return super().create(key, body)


def test_a_write_whose_answer_was_lost_is_recognised():
    store = LosingStore(1, applied=True)
    assert commit(store, "a", b"nonce 1") is True
    assert store.get("a") == b"nonce 1"


def test_a_lost_answer_after_somebody_elses_write_is_a_loss():
    store = LosingStore(0, applied=True)
    assert commit(store, "a", b"theirs")
    store.answers_lost = 1
    assert commit(store, "a", b"mine") is False
    assert store.get("a") == b"theirs"


def test_a_write_that_left_nothing_is_no_success():
    store = LosingStore(1, applied=False)
    with pytest.raises(StoreUnavailable, match="left nothing behind"):
        commit(store, "a", b"nonce 1")
    assert commit(store, "a", b"nonce 1") is True


def test_a_retried_create_that_meets_its_own_object_is_a_success():
    assert commit(RetryingStore(), "a", b"nonce 1") is True


@pytest.mark.parametrize("key", ["a", "a/b.c", "A-_/x", "..a", "a..b/...", "0"])
def test_good_keys_are_returned(key):
    assert check_key(key) == key


def test_errors_are_also_what_the_standard_library_calls_them():
    assert issubclass(ObjectMissing, LookupError)
    assert issubclass(StoreUnavailable, TimeoutError)
    assert issubclass(StoreDenied, PermissionError)
    assert all(issubclass(kind, StorageError) for kind in (ObjectMissing, StoreUnavailable, StoreDenied))
