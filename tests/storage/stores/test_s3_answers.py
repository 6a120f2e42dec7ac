"""S3Store against proxies and portals that answer in a server's place, and refusals that are not about rights."""

import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from storage.stores.s3 import S3Store
from storage.stores.store import ObjectMissing, StoreDenied, StoreUnavailable, StoreUnfit, commit
from tests.s3_server import S3_BUCKET, SerialisedMoto, make_bucket, moto_server, point_to, scripted_server
from tests.storage.stores.test_s3 import VERBS

pytestmark = pytest.mark.slow

PAGE = "<html><head><title>Sign in</title></head><body>Welcome</body></html>"
PAGES = [(403, PAGE), (404, PAGE), (412, PAGE), (416, PAGE), (502, PAGE)]
NOT_S3 = r"what answers is no S3 server: correct the endpoint \(AWS_ENDPOINT_URL\)"


class Portal(SerialisedMoto):
    """Answers the next `lies` requests itself with `page`, then forwards; an ETag goes missing while `strips`."""

    lies = 0
    page = PAGE
    strips = False

    def __call__(self, environment: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if self.lies:
            self.lies -= 1
            length = int(environment.get("CONTENT_LENGTH") or 0)
            environment["wsgi.input"].read(length)
            kind = [("Content-Type", "text/html")] if self.page else []
            start_response("200 OK", [*kind, ("Content-Length", str(len(self.page)))])
            return [self.page.encode()]

        def start(status: str, headers: Iterable[tuple[str, str]], *rest: Any) -> Any:
            is_write = environment["REQUEST_METHOD"] == "PUT"
            kept = [pair for pair in headers if not (self.strips and is_write and pair[0].lower() == "etag")]
            return start_response(status, kept, *rest)

        return super().__call__(environment, start)


@pytest.fixture(scope="module")
def portal() -> Iterator[tuple[str, Portal]]:
    with moto_server(Portal) as (endpoint, application):
        with pytest.MonkeyPatch.context() as environment:
            point_to(endpoint, environment)
            make_bucket(endpoint)
        assert isinstance(application, Portal)
        yield endpoint, application


@pytest.fixture
def behind(portal: tuple[str, Portal], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3Store, Portal]]:
    """A store of its own behind the portal."""
    endpoint, application = portal
    point_to(endpoint, monkeypatch)
    application.lies, application.page, application.strips = 0, PAGE, False
    with closing(S3Store(S3_BUCKET, uuid.uuid4().hex, deadline_s=60, backoff_s=0.001)) as store:
        yield store, application


@contextmanager
def scripted(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, str, str], **told: Any) -> Iterator[Any]:
    deadline_s = told.pop("deadline_s", 60)
    with scripted_server(list(answers), **told) as (endpoint, seen):
        point_to(endpoint, monkeypatch)
        with closing(S3Store("bucket", "run", deadline_s=deadline_s, backoff_s=0.2)) as store:
            yield store, seen


@pytest.mark.parametrize("page", [PAGE, ""], ids=["a page", "nothing"])
def test_a_write_counts_when_it_is_stored_and_not_when_somebody_says_so(behind, page):
    store, portal = behind
    portal.page = page
    for name, write in (("a", store.create), ("b", store.put), ("c", lambda key, body: commit(store, key, body))):
        # The first answer to the write, and to the question whether the object is there.
        portal.lies = 2
        assert write(name, b"nonce") is not False
        assert portal.lies == 0
        assert store.get(name) == b"nonce"
    portal.lies = 1
    assert store.get("a") == b"nonce"
    portal.lies = 1
    assert store.list("") == ["a", "b", "c"]
    portal.lies = 2
    store.delete("b")
    assert store.list("") == ["a", "c"]


def test_an_object_that_is_there_is_written_though_a_proxy_hides_its_etag(behind):
    store, portal = behind
    portal.strips = True
    assert store.create("a", b"mine") is True
    assert store.create("a", b"theirs") is False
    store.put("b", b"1")
    assert (store.get("a"), store.get("b")) == (b"mine", b"1")


@pytest.mark.parametrize(("status", "page"), [(200, PAGE), (200, ""), (200, "<html/>"), *PAGES])
def test_a_portals_page_is_no_answer(monkeypatch, status, page):
    """Neither is an object written, missing, or there because a portal uses a status that S3 gives a meaning."""
    with scripted(monkeypatch, (status, "", page), is_s3=False, deadline_s=2) as (store, _):
        for verb in [*VERBS, lambda store: commit(store, "a", b"x")]:
            with pytest.raises(StoreUnavailable, match=NOT_S3) as caught:
                verb(store)
            assert "Welcome" not in str(caught.value)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("is_s3", [True, False])
def test_a_redirect_that_names_no_region_is_one_request_and_one_line(monkeypatch, status, is_s3):
    with scripted(monkeypatch, (status, "", ""), is_s3=is_s3, deadline_s=2) as (store, seen):
        for count, verb in enumerate(VERBS, start=1):
            with pytest.raises((StoreDenied, StoreUnavailable), match=r"set AWS_REGION|AWS_ENDPOINT_URL") as caught:
                verb(store)
            assert "\n" not in str(caught.value)
            assert not is_s3 or len(seen) == count
        assert not any(request.startswith("HEAD") for request in seen)


def test_a_page_that_says_that_the_request_is_in_vain_is_believed(monkeypatch):
    with scripted(monkeypatch, (501, "", PAGE), is_s3=False) as (store, seen):
        with pytest.raises(StoreUnfit, match="does not implement something in this request"):
            store.put("a", b"x")
        assert len(seen) == 1


REFUSALS = [
    (403, "RequestTimeTooSkewed", "", r"clock is minutes away from the server's"),
    (400, "RequestTimeTooSkewed", "", r"clock is minutes away"),
    (403, "QuotaExceeded", "", "the store has no room"),
    (507, "XMinioStorageFull", "", "the store has no room"),
    (400, "XMinioAdminBucketQuotaExceeded", "", "the store has no room"),
    (400, "KMS.DisabledException", "", "the key that encrypts the bucket"),
    (400, "KMS.NotFoundException", "", "the key that encrypts the bucket"),
    (403, "KMS.AccessDeniedException", "", "kms:GenerateDataKey and kms:Decrypt"),
    (400, "XMinioKMSNotConfigured", "", "the key that encrypts the bucket"),
    (403, "InvalidObjectState", "", "moved to an archive"),
    (403, "AccountProblem", "", "the server's code"),
]


@pytest.mark.parametrize(("status", "code", "extra", "advice"), REFUSALS)
def test_a_refusal_that_is_not_about_credentials_does_not_send_anyone_to_them(monkeypatch, status, code, extra, advice):
    with scripted(monkeypatch, (status, code, extra)) as (store, seen):
        for count, verb in enumerate(VERBS, start=1):
            with pytest.raises(StoreDenied, match=advice) as caught:
                verb(store)
            assert f"({code})" in str(caught.value)
            assert "check the credentials" not in str(caught.value)
            assert len(seen) == count


@contextmanager
def raw(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    """A store on a server that answers each connection with these bytes and closes it."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 " + answer)
                    connection.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        point_to(f"http://127.0.0.1:{listener.getsockname()[1]}", monkeypatch)
        thread = threading.Thread(target=serve)
        thread.start()
        with closing(S3Store("bucket", "run", deadline_s=1, backoff_s=0.01)) as store:
            yield store
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_missing_right_to_the_key_is_told_from_a_missing_right_to_the_bucket(monkeypatch):
    """S3 gives both the same code."""
    text = b"<Error><Code>AccessDenied</Code><Message>not allowed: kms:Decrypt on arn:1</Message></Error>"
    answer = b"403 Forbidden\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text)
    with raw(answer, monkeypatch) as store, pytest.raises(StoreDenied, match="need kms:GenerateDataKey") as caught:
        store.get("a")
    assert "arn:1" not in str(caught.value)


CHUNKED = b"200 OK\r\nETag: 1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n5\r\n56789\r\n"


@pytest.mark.parametrize(
    ("answer", "start", "end", "body"),
    [
        (CHUNKED + b"0\r\n\r\n", 0, None, b"0123456789"),
        (b"200 OK\r\nETag: 1\r\nContent-Length: 10\r\n\r\n0123456789", 2, 5, b"234"),
        (b"200 OK\r\nETag: 1\r\nContent-Length: 10\r\n\r\n0123456789", 12, None, b""),
        (b"206 OK\r\nETag: 1\r\nContent-Range: bytes 2-4/10\r\nContent-Length: 3\r\n\r\n234", 2, 5, b"234"),
        (b"206 OK\r\nETag: 1\r\nContent-Range: bytes 8-9/10\r\nContent-Length: 2\r\n\r\n89", 8, 15, b"89"),
    ],
)
def test_a_body_that_is_stated_otherwise_is_read_all_the_same(monkeypatch, answer, start, end, body):
    with raw(answer, monkeypatch) as store:
        assert store.get("a", start, end) == body


@pytest.mark.parametrize(
    "answer",
    [
        b"200 OK\r\nETag: 1\r\n\r\n01234",
        CHUNKED,
        b"200 OK\r\nETag: 1\r\nContent-Length: 10\r\n\r\n01234",
        b"200 OK\r\nContent-Length: 10\r\n\r\n0123456789",
        b"206 OK\r\nETag: 1\r\nContent-Range: bytes 0-2/10\r\nContent-Length: 3\r\n\r\n012",
        b"206 OK\r\nETag: 1\r\nContent-Range: bytes 2-3/10\r\nContent-Length: 2\r\n\r\n23",
        b"206 OK\r\nETag: 1\r\nContent-Length: 3\r\n\r\n012",
    ],
)
def test_a_body_that_may_be_cut_or_another_is_not_believed(monkeypatch, answer):
    with raw(answer, monkeypatch) as store, pytest.raises(StoreUnavailable, match=r"cannot get .* no answer within"):
        store.get("a", 2, 5)


LISTINGS = {
    "nothing": "<ListBucketResult></ListBucketResult>",
    "no next page": "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    "the same page": "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>1</NextContinuationToken>"
    "</ListBucketResult>",
    "other keys": "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>other/a</Key></Contents>"
    "</ListBucketResult>",
    "no key": "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Size>1</Size></Contents>"
    "</ListBucketResult>",
}


@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS.keys())
def test_a_listing_that_is_none_is_not_believed(monkeypatch, listing):
    with (
        scripted(monkeypatch, (200, "", listing), deadline_s=2) as (store, _),
        pytest.raises(StoreUnavailable, match=NOT_S3),
    ):
        store.list("a")


def test_a_missing_object_is_missing_by_its_code_and_by_a_status_without_a_page(monkeypatch):
    for code in ("NoSuchKey", "404"):
        with scripted(monkeypatch, (404, code, "")) as (store, _), pytest.raises(ObjectMissing):
            store.get("a")


def test_an_endpoint_of_a_file_of_settings_gets_no_checksums_either(monkeypatch, tmp_path):
    """`endpoint_url` of ~/.aws/config, for all services or for S3 alone."""
    kinds = ["[default]\nendpoint_url = {}\n", "[default]\nservices = own\n[services own]\ns3 =\n  endpoint_url = {}\n"]
    for kind in kinds:
        with scripted_server([(400, "InvalidArgument", "")], refused_header="checksum") as (endpoint, seen):
            point_to(endpoint, monkeypatch)
            monkeypatch.delenv("AWS_ENDPOINT_URL")
            (tmp_path / "config").write_text(kind.format(endpoint))
            monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
            with closing(S3Store("bucket", "run")) as store:
                store.put("a", b"x")
            assert seen == ["PUT /bucket/run/a"]
