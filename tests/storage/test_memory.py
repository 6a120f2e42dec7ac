import pytest

from storage.memory import MemoryStore
from tests.contracts.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore("contract")


def test_the_url_names_the_store():
    assert MemoryStore("a").url == "memory://a"
