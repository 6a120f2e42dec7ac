import pytest

from storage.stores.connect import connect
from storage.stores.memory import MemoryStore, NestedStore
from storage.stores.store import ObjectMissing, ObjectStore
from storage.testing import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore("contract")


def test_the_url_names_the_store():
    assert MemoryStore("a").url == "memory://a"


@pytest.mark.slow
class TestNestedStore(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return NestedStore(MemoryStore("contract"), "runs/a")


def test_it_sees_what_is_below_its_prefix_and_nothing_else():
    whole = MemoryStore("whole")
    nested = NestedStore(whole, "a/b")
    for key in ("a/b/c", "a/b/d/e", "a/bb", "a/b.json", "z"):
        whole.put(key, key.encode())
    assert nested.list("") == ["c", "d/e"]
    assert nested.list("", after="c") == ["d/e"]
    assert nested.get("d/e") == b"a/b/d/e"
    nested.delete("c")
    assert whole.list("a/") == ["a/b.json", "a/b/d/e", "a/bb"]


def test_what_is_missing_is_called_by_its_key_in_the_nested_store():
    with pytest.raises(ObjectMissing, match=r"^no object 'x'$"):
        NestedStore(MemoryStore(), "a").get("x")


@pytest.mark.parametrize("prefix", ["", "a/", "/a", "a/../b", "a b"])
def test_a_prefix_that_is_no_key_is_refused(prefix):
    with pytest.raises(ValueError, match="not a storage key"):
        NestedStore(MemoryStore(), prefix)


def test_a_url_in_memory_may_have_a_prefix():
    nested = connect("memory://nested/evaluations/00000001-ab")
    nested.put("plan.json", b"1")
    assert nested.url == "memory://nested/evaluations/00000001-ab"
    assert connect("memory://nested").list("") == ["evaluations/00000001-ab/plan.json"]
    assert connect(nested.url).get("plan.json") == b"1"
