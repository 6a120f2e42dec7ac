"""CloudStore against obstore's own memory, and against servers that deny, break down, or say nothing at all."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install -c constraints.txt -e '.[dev]'")

from obstore.store import MemoryStore

from storage.stores import cloud
from storage.stores.cloud import CloudStore
from storage.stores.connect import connect
from storage.stores.store import ObjectMissing, ObjectStore, StoreDenied, StoreUnavailable, StoreUnfit
from storage.testing import StoreContract
from tests.s3_server import scripted_server

pytestmark = pytest.mark.slow

SECRET = "a-secret-that-no-message-may-show"
VERBS: list[Callable[[ObjectStore], object]] = [
    lambda store: store.create("a", b"x"),
    lambda store: store.put("a", b"x"),
    lambda store: store.get("a"),
    lambda store: store.list(""),
    lambda store: store.delete("a"),
]


class TestCloudStore(StoreContract):
    races = 30

    @pytest.fixture
    def store(self) -> CloudStore:
        return CloudStore("gs://memory", MemoryStore(), "runs/user=me")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[CloudStore, list[str]]]]:
    """Makes (store, requests so far) of a server that speaks as Google's and gives scripted answers."""
    opened = []

    def start(*answers: tuple[int, str, str], deadline_s: float = 60) -> tuple[CloudStore, list[str]]:
        context = scripted_server(list(answers))
        endpoint, seen = context.__enter__()
        opened.append(context)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        found = connect("gs://bucket/run")
        assert isinstance(found, CloudStore)
        return CloudStore("gs://bucket", found._opened, "run", deadline_s=deadline_s, backoff_s=0.001), seen

    yield start
    for context in opened:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("url", ["gs://bucket", "gs://bucket/runs/user=me/7", "az://box/runs/7"])
def test_the_url_of_a_store_leads_back_to_it(monkeypatch, url):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    assert connect(url).url == url
    assert isinstance(connect(url), CloudStore)


def test_stores_with_other_prefixes_do_not_meet():
    opened = MemoryStore()
    inner, outer, sibling = (CloudStore("gs://b", opened, prefix) for prefix in ("a/run", "a", "a/run2"))
    assert inner.create("x", b"1")
    assert sibling.list("") == []
    assert outer.list("") == ["run/x"]
    with pytest.raises(ObjectMissing):
        sibling.get("x")


def test_a_precondition_that_failed_is_an_object_that_exists(server):
    store, seen = server((412, "PreconditionFailed", ""))
    assert store.create("a", b"x") is False
    assert len(seen) == 1


@pytest.mark.parametrize("status", [403, 401])
def test_refused_credentials_are_one_line_without_the_servers_text(server, status):
    store, seen = server((status, SECRET, ""))
    for verb in VERBS:
        with pytest.raises(StoreDenied, match=r"gs://bucket/run.*GOOGLE_APPLICATION_CREDENTIALS") as caught:
            verb(store)
        assert "\n" not in str(caught.value)
        assert SECRET not in str(caught.value)
    assert len(seen) == len(VERBS), "a refusal is not asked for again"


@pytest.mark.parametrize(("status", "code"), [(401, SECRET), (403, "AuthenticationFailed")])
def test_credentials_that_a_server_refuses_after_an_answer_are_read_anew_once_per_refusal(server, status, code):
    first, seen = server((200, "", ""), (status, code, ""), (status, code, ""), (200, "", ""))
    opened = []

    def reopen():
        opened.append(first._opened)
        return first._opened

    store = CloudStore("gs://bucket", first._opened, "run", reopen=reopen)
    store.delete("a")
    store.delete("a")
    assert (len(seen), len(opened)) == (4, 2)


def test_a_right_that_is_missing_is_refused_at_once_though_the_server_has_answered(server):
    store, seen = server((200, "", ""), (403, "AccessDenied", ""))
    store.delete("a")
    with pytest.raises(StoreDenied):
        store.delete("a")
    assert len(seen) == 2


def test_a_bucket_that_does_not_exist_is_no_missing_object(server):
    store, _ = server((404, "NoSuchBucket", ""))
    for verb in (VERBS[0], VERBS[1], VERBS[3]):
        with pytest.raises(StoreDenied, match="no such bucket or container"):
            verb(store)


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_server_that_breaks_down_is_asked_again(server, status):
    store, seen = server((status, "SlowDown", ""), (status, "SlowDown", ""), (200, "", ""))
    store.delete("a")
    assert len(seen) == 3


def test_a_server_that_does_not_know_the_request_is_unfit(server):
    store, seen = server((501, "NotImplemented", ""))
    for verb in VERBS:
        with pytest.raises(StoreUnfit, match="the server does not implement this request"):
            verb(store)
    assert len(seen) == len(VERBS)


def test_a_server_that_never_recovers_is_unavailable(server):
    store, seen = server((503, SECRET, ""), deadline_s=0.5)
    for verb in VERBS:
        # The time may be over in the middle of a request: then the last attempt ends without an answer.
        with pytest.raises(StoreUnavailable, match=r"attempts, last (GenericError, status 503|TimeoutError)") as caught:
            verb(store)
        assert SECRET not in str(caught.value)
    assert len(seen) > len(VERBS)


def test_a_silent_server_is_given_up(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        found = connect("gs://bucket")
        assert isinstance(found, CloudStore)
        store = CloudStore("gs://bucket", found._opened, deadline_s=0.5)
        for verb in VERBS:
            with pytest.raises(StoreUnavailable, match="last TimeoutError"):
                verb(store)


def test_azure_without_an_account_is_one_line(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(StoreDenied, match=r"^az://box: check AZURE_STORAGE_ACCOUNT_NAME and a credential"):
        connect("az://box/run")


def use(store, answers):
    try:
        store.list("")
    except StoreUnfit as error:
        answers.send(str(error))


def test_a_forked_process_is_told_instead_of_waiting_for_ever():
    store = CloudStore("gs://memory", MemoryStore())
    store.put("a", b"x")
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=use, args=(store, theirs))
    process.start()
    assert mine.poll(600)
    assert "forked after the first use" in mine.recv()
    process.join()


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(StoreUnfit, match=r"gs:// needs the package obstore: pip install .*\[obstore\]"):
        connect("gs://bucket/x")


def test_only_reads_and_deletes_miss_objects():
    verbs = ("create", "put", "get", "list", "delete")
    assert {verb: cloud.judge(FileNotFoundError(""), verb) for verb in verbs} == {
        "create": "denied",
        "put": "denied",
        "get": "missing",
        "list": "denied",
        "delete": "missing",
    }
