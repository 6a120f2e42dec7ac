"""CloudStore against Azurite, whose blobs are Azure's; skipped where it is not installed."""

import uuid

import pytest

from storage.records.fitness import prove
from storage.stores.connect import connect
from storage.stores.store import ObjectStore, StoreDenied
from storage.testing import StoreContract

pytestmark = pytest.mark.slow


class TestAzurite(StoreContract):
    races = 30
    many_keys = 1200
    overwrites = 60

    @pytest.fixture
    def store(self, azurite_url: str) -> ObjectStore:
        return connect(f"{azurite_url}/{uuid.uuid4().hex}")


def test_the_store_is_proven_fit_with_processes(azurite_url):
    store = connect(f"{azurite_url}/{uuid.uuid4().hex}")
    findings = list(prove(store, keys=20, listed=1200))
    assert [finding.lack for finding in findings] == [None] * len(findings)
    assert "one winner among processes" in [finding.name for finding in findings]


def test_a_container_that_does_not_exist(azurite_url):
    store = connect("az://nowhere/run")
    for verb in (lambda: store.create("a", b"x"), lambda: store.put("a", b"x"), lambda: store.list("")):
        with pytest.raises(StoreDenied, match=r"az://nowhere/run.*no such bucket or container"):
            verb()


def test_a_wrong_key_is_one_line(azurite_url, azurite_endpoint, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_USE_EMULATOR")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{azurite_endpoint}/devstoreaccount1")
    store = connect(f"{azurite_url}/run")
    for verb in (lambda: store.create("a", b"x"), lambda: store.get("a"), lambda: store.list("")):
        with pytest.raises(StoreDenied, match=r"az://.*refused: check AZURE_STORAGE_ACCOUNT_NAME") as caught:
            verb()
        assert "\n" not in str(caught.value)
