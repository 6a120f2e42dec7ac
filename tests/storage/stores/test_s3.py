"""S3Store against moto, and against servers that deny, throttle, answer otherwise, or say nothing at all."""

import os
import re
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator

import pytest

from storage.stores.connect import connect
from storage.stores.s3 import S3Store, session_options
from storage.stores.store import ObjectMissing, ObjectStore, StoreDenied, StoreUnavailable, StoreUnfit, commit
from storage.testing import StoreContract
from tests.s3_server import SerialisedMoto, scripted_server

pytestmark = pytest.mark.slow

SECRET = "a-secret-that-no-message-may-show"
LIST_OF_NOTHING = "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
OK = (200, "", "")
VERBS: list[Callable[[ObjectStore], object]] = [
    lambda store: store.create("a", b"x"),
    lambda store: store.put("a", b"x"),
    lambda store: store.get("a"),
    lambda store: store.list(""),
    lambda store: store.delete("a"),
]


class TestS3Store(StoreContract):
    races = 12
    many_keys = 130
    overwrites = 40

    @pytest.fixture
    def store(self, s3_url: str) -> Iterator[S3Store]:
        store = connect(f"{s3_url}/{uuid.uuid4().hex}")
        assert isinstance(store, S3Store)
        yield store
        store.close()


@pytest.fixture
def credentials(s3_server: SerialisedMoto, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of the test server, to be changed by one test."""
    return monkeypatch


@pytest.fixture
def server(credentials: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[S3Store, list[str]]]]:
    """Makes (store, requests so far) of a server that gives scripted answers."""
    opened = []

    def start(*answers: tuple[int, str, str], deadline_s: float = 60) -> tuple[S3Store, list[str]]:
        context = scripted_server(list(answers))
        endpoint, seen = context.__enter__()
        credentials.setenv("AWS_ENDPOINT_URL", endpoint)
        store = S3Store("bucket", "run", deadline_s=deadline_s, backoff_s=0.001)
        opened.append((context, store))
        return store, seen

    yield start
    for context, store in opened:
        store.close()
        context.__exit__(None, None, None)


def test_stores_with_other_prefixes_do_not_meet(s3_url):
    name = uuid.uuid4().hex
    inner, outer, sibling = (
        connect(f"{s3_url}/{name}/run"),
        connect(f"{s3_url}/{name}"),
        connect(f"{s3_url}/{name}/run2"),
    )
    assert inner.create("a", b"1")
    assert sibling.list("") == []
    assert outer.list("") == ["run/a"]
    assert outer.get("run/a") == b"1"
    with pytest.raises(ObjectMissing):
        sibling.get("a")


def test_another_clients_write_is_seen_at_once(s3_url):
    url = f"{s3_url}/{uuid.uuid4().hex}"
    mine, theirs = connect(url), connect(url)
    assert mine.list("") == []
    assert theirs.create("a", b"1")
    assert mine.list("") == ["a"]
    theirs.delete("a")
    with pytest.raises(ObjectMissing):
        mine.get("a")
    assert mine.list("") == []


def test_a_lost_answer_is_resolved_by_commit(s3_url, s3_server):
    store = connect(f"{s3_url}/{uuid.uuid4().hex}")
    s3_server.lost.add("lost-one")
    assert store.create("lost-one", b"nonce 1") is False, "the retry meets its own object"
    assert store.get("lost-one") == b"nonce 1"
    s3_server.lost.add("lost-two")
    assert commit(store, "lost-two", b"nonce 2") is True


def test_a_bucket_that_does_not_exist(s3_url):
    store = connect("s3://nowhere/run")
    for verb in VERBS:
        with pytest.raises(StoreDenied, match=r"s3://nowhere/run.* at http://127.*no such bucket") as caught:
            verb(store)
        assert "\n" not in str(caught.value)


def test_missing_credentials_are_one_line_that_says_what_to_set(credentials):
    credentials.delenv("AWS_ACCESS_KEY_ID")
    credentials.delenv("AWS_SECRET_ACCESS_KEY")
    store = connect("s3://bucket/run")
    for verb in VERBS:
        with pytest.raises(
            StoreDenied, match=r"s3://bucket/run.*AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) as caught:
            verb(store)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
def test_refused_credentials_are_not_retried_and_not_shown(server, code):
    store, seen = server((403, code, ""))
    for count, verb in enumerate(VERBS, start=1):
        with pytest.raises(StoreDenied, match=rf"s3://bucket/run.*http://127.*s3:PutObject.*\({code}\)") as caught:
            verb(store)
        assert SECRET not in str(caught.value)
        assert len(seen) == count


@pytest.mark.parametrize(
    ("status", "code", "kind", "advice"),
    [
        (301, "PermanentRedirect", StoreDenied, "set AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", StoreDenied, "set AWS_REGION"),
        (501, "NotImplemented", StoreUnfit, "does not implement"),
        (400, "ExpiredToken", StoreDenied, "check the credentials"),
        (401, "Unknown", StoreDenied, "check the credentials"),
        (400, "SomethingNew", StoreUnfit, r"refuses something in this request.*\(SomethingNew\)"),
    ],
)
def test_other_refusals(server, status, code, kind, advice):
    store, _ = server((status, code, ""))
    with pytest.raises(kind, match=advice):
        store.create("a", b"x")


@pytest.mark.parametrize("answer", [(400, "InvalidArgument"), (400, "InvalidRequest"), (501, "NotImplemented")])
@pytest.mark.parametrize("verb", VERBS[:3])
def test_a_server_that_knows_no_checksums_gets_none(credentials, answer, verb):
    """Ceph before 18, MinIO of 2023, OVH's and others refuse what newer clients of AWS add unasked."""
    with scripted_server([(*answer, "")], refused_header="checksum") as (endpoint, seen):
        credentials.setenv("AWS_ENDPOINT_URL", endpoint)
        store = S3Store("bucket", "run", deadline_s=60)
        verb(store)
        assert len(seen) == 1
        store.close()
        credentials.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
        credentials.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "When_Supported")
        store = S3Store("bucket", "run", deadline_s=60)
        with pytest.raises(StoreUnfit, match=rf"set both to when_required \({answer[1]}\)") as caught:
            verb(store)
        assert "AWS_REQUEST_CHECKSUM_CALCULATION" in str(caught.value)
        assert "credentials" not in str(caught.value)
        store.close()


def test_a_checksum_of_something_else_is_not_looked_at_unless_it_is_asked_for(credentials):
    """Some servers state the whole object's checksum for a part of it."""
    with scripted_server([(200, "", "body")], checksum="AAAAAA==") as (endpoint, _):
        credentials.setenv("AWS_ENDPOINT_URL", endpoint)
        store = S3Store("bucket", "run", deadline_s=60)
        assert store.get("a") == b"body"
        store.close()
        credentials.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_supported")
        store = S3Store("bucket", "run", deadline_s=8)
        with pytest.raises(StoreUnavailable, match=r"last FlexibleChecksumError; .*AWS_RESPONSE_CHECKSUM_VALIDATION"):
            store.get("a")
        store.close()


@pytest.mark.parametrize(
    "answer",
    [
        (503, "SlowDown", ""),
        (503, "ServiceUnavailable", ""),
        (500, "InternalError", ""),
        (502, "BadGateway", ""),
        (429, "TooManyRequests", ""),
        (400, "RequestTimeout", ""),
        (409, "ConditionalRequestConflict", ""),
        (409, "OperationAborted", ""),
    ],
)
def test_passing_failures_are_retried(server, answer):
    store, seen = server(answer, answer, OK)
    assert store.create("a", b"x") is True
    assert len(seen) == 3


def test_retries_are_bounded_and_the_outcome_is_called_unknown(server):
    store, seen = server((503, "SlowDown", ""), deadline_s=1.2)
    attempts = []
    for verb in VERBS:
        seen.clear()
        with pytest.raises(StoreUnavailable, match=r"s3://bucket/run/a?.* no answer") as caught:
            verb(store)
        told = re.search(
            r"no answer within ([0-9.]+) s and (\d+) attempts, last \w+(; a write may.*)?$", str(caught.value)
        )
        assert told is not None
        assert 0 < float(told[1]) < 2
        # One that the last verb had given up on may arrive late.
        attempts.append(int(told[2]))
        assert attempts[-1] >= max(1, len(seen) - 1)
        assert bool(told[3]) is (verb in VERBS[:2]), "only a write can have happened"
    # On a busy machine the first attempt of a verb may take all its time.
    assert max(attempts) > 1


@pytest.mark.parametrize(
    "extra", ["<Condition>If-None-Match</Condition>", ""], ids=["as AWS says it", "as radosgw says it"]
)
def test_a_refused_create_is_false_on_every_kind_of_server(server, extra):
    store, seen = server((412, "PreconditionFailed", extra))
    assert store.create("a", b"x") is False
    assert len(seen) == 1


def test_a_page_of_a_listing_is_retried(server):
    store, seen = server((503, "SlowDown", ""), (200, "", LIST_OF_NOTHING))
    assert store.list("") == []
    assert len(seen) == 2


def test_a_listing_goes_on_where_its_page_ended(server):
    first = (
        "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>here</NextContinuationToken>"
        "<Contents><Key>run/a/1</Key></Contents></ListBucketResult>"
    )
    second = (
        "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>run/a/2</Key></Contents></ListBucketResult>"
    )
    store, seen = server((200, "", first), (200, "", second))
    assert store.list("a/", after="a/0") == ["a/1", "a/2"]
    assert "start-after=run%2Fa%2F0" in seen[0]
    assert "prefix=run%2Fa%2F" in seen[0]
    assert "continuation-token=here" in seen[1]


@pytest.mark.parametrize("verb", VERBS)
def test_a_silent_server_is_given_up_in_time(credentials, verb):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        credentials.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        store = S3Store("bucket", deadline_s=0.4, backoff_s=0.001)
        with pytest.raises(StoreUnavailable, match=r"no answer within [0-9.]+ s and \d+ attempts"):
            verb(store)
        store.close()


def test_a_server_that_is_not_there(credentials):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    credentials.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:{port}")
    store = S3Store("bucket", deadline_s=0.3, backoff_s=0.001)
    with pytest.raises(StoreUnavailable, match=f"http://127.0.0.1:{port}: no answer") as caught:
        store.get("a")
    assert SECRET not in str(caught.value)


def test_many_threads_share_one_store(s3_url):
    store = connect(f"{s3_url}/{uuid.uuid4().hex}")
    threads = [threading.Thread(target=store.put, args=(f"k/{number}", b"x")) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.list("k/")) == 24


def run_python(code: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("ending", ["", "store.close(); del store; sys.exit(3)"])
def test_nothing_is_printed_when_the_interpreter_exits(s3_url, ending):
    code = (
        "import sys; from storage.stores.connect import connect; store = connect(sys.argv[1]);"
        f"store.put('a', b'1'); connect(sys.argv[1] + '/b').put('a', b'2'); assert store.list('a') == ['a'];\n{ending}"
    )
    done = run_python(code, f"{s3_url}/{uuid.uuid4().hex}")
    assert (done.stdout, done.stderr) == ("", "")
    assert done.returncode == (3 if "3" in ending else 0)


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_child_has_connections_of_its_own(s3_url, end):
    code = f"""
import os, sys
from storage.stores.connect import connect
store = connect(sys.argv[1])
assert store.create("parent", b"1")
child = os.fork()
if child == 0:
    assert store.get("parent") == b"1" and store.create("child", b"2")
    {end}
assert os.waitpid(child, 0)[1] == 0
assert store.list("") == ["child", "parent"]
"""
    done = run_python(code, f"{s3_url}/{uuid.uuid4().hex}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_flytes_variables_stand_in_for_absent_ones():
    flyte = {
        "FLYTE_AWS_ENDPOINT": "http://minio:9000",
        "FLYTE_AWS_ACCESS_KEY_ID": "flyte",
        "FLYTE_AWS_SECRET_ACCESS_KEY": "hush",
    }
    options = session_options(flyte)
    assert (options["endpoint_url"], options["key"], options["secret"]) == ("http://minio:9000", "flyte", "hush")
    assert options["config_kwargs"]["s3"] == {"addressing_style": "path"}
    own = {"AWS_ENDPOINT_URL": "http://own", "AWS_ACCESS_KEY_ID": "own", "AWS_SECRET_ACCESS_KEY": "hush"}
    options = session_options(flyte | own)
    assert (options["endpoint_url"], options["key"], options["secret"]) == ("http://own", None, None)


def test_checksums_are_left_to_aws_unless_the_environment_says_otherwise():
    kept = ("request_checksum_calculation", "response_checksum_validation")

    def chosen(**environment):
        given = session_options(environment)["config_kwargs"]
        return tuple(given.get(name) for name in kept)

    assert chosen() == (None, None)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "FLYTE_AWS_ENDPOINT"):
        assert chosen(**{name: "http://own"}) == ("when_required", "when_required")
    asked = {"AWS_REQUEST_CHECKSUM_CALCULATION": "WHEN_SUPPORTED", "AWS_ENDPOINT_URL": "http://own"}
    assert chosen(**asked) == ("when_supported", "when_required")
    assert chosen(AWS_RESPONSE_CHECKSUM_VALIDATION="when_required") == (None, "when_required")


def test_region_and_addressing_come_from_the_environment():
    assert session_options({})["config_kwargs"]["s3"] == {"addressing_style": "auto"}
    assert session_options({})["client_kwargs"] == {}
    options = session_options(
        {"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "x", "AWS_S3_ADDRESSING_STYLE": "virtual"}
    )
    assert options["client_kwargs"] == {"region_name": "eu-west-1"}
    assert options["config_kwargs"]["s3"] == {"addressing_style": "virtual"}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("AWS_ENDPOINT_URL", "minio:9000", "http://"),
        ("AWS_S3_ADDRESSING_STYLE", "paths", "path, virtual, auto"),
        ("AWS_REQUEST_CHECKSUM_CALCULATION", "never", "when_supported, when_required"),
        ("AWS_RESPONSE_CHECKSUM_VALIDATION", "never", "when_supported, when_required"),
    ],
)
def test_bad_variables_are_named(name, value, allowed):
    with pytest.raises(ValueError, match=f"{name}.*allowed: .*{allowed}"):
        session_options({name: value})


def test_the_environment_is_that_of_the_test_server(s3_url):
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET


def test_stores_of_a_process_read_the_description_of_s3_once(s3_url):
    code = (
        "import sys; from storage.stores.connect import connect; files = []\n"
        "sys.addaudithook(lambda event, args: files.append(str(args[0])) if event == 'open' else None)\n"
        f"for k in range(3): connect('{s3_url}/' + str(k)).list('')\n"
        "found = [file for file in files if '/s3/' in file and 'service-2' in file]\n"
        "print(len(found) - len(set(found)), bool(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 True\n"
