"""S3Store against Ceph's radosgw, a real server of another authorship; skipped where its packages are not installed."""

import uuid
from collections.abc import Iterator

import pytest

from storage.stores.connect import connect
from storage.stores.s3 import S3Store
from storage.stores.store import StoreDenied
from storage.testing import StoreContract


class TestRadosgw(StoreContract):
    many_keys = 1200

    @pytest.fixture
    def store(self, radosgw_url: str) -> Iterator[S3Store]:
        store = connect(f"{radosgw_url}/{uuid.uuid4().hex}")
        assert isinstance(store, S3Store)
        yield store
        store.close()


VERBS = [
    lambda store: store.create("a", b"x"),
    lambda store: store.put("a", b"x"),
    lambda store: store.get("a"),
    lambda store: store.list(""),
    lambda store: store.delete("a"),
]


@pytest.mark.parametrize(
    ("variable", "code"),
    [("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"), ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch")],
)
def test_wrong_credentials_are_one_line(radosgw_url, monkeypatch, variable, code):
    monkeypatch.setenv(variable, "wrong")
    store = connect(f"{radosgw_url}/run")
    for verb in VERBS:
        with pytest.raises(StoreDenied, match=rf"s3://.*/run.*refused: check the credentials.*\({code}\)") as caught:
            verb(store)
        assert "\n" not in str(caught.value)


def test_a_bucket_that_does_not_exist(radosgw_url):
    store = connect("s3://nowhere/run")
    for verb in VERBS:
        with pytest.raises(StoreDenied, match=r"s3://nowhere/run.*no such bucket"):
            verb(store)


def test_a_create_beyond_the_size_of_an_upload_in_parts_is_still_refused(radosgw_url):
    """This server ignores the condition of an upload in parts, which s3fs makes of 100 MiB and more."""
    store = connect(f"{radosgw_url}/{uuid.uuid4().hex}")
    body = bytes(101 << 20)
    assert store.create("big", body) is True
    assert store.create("big", b"x" + body) is False
    assert store.get("big", 0, 1) == b"\0"
    store.delete("big")
