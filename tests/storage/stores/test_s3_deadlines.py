"""Every verb of S3Store ends in time whatever the peer does, and not before; the throttled come back one by one."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from storage.stores import budget, s3
from storage.stores.s3 import S3Store
from storage.stores.store import StoreUnavailable
from tests.s3_server import point_to, scripted_server
from tests.storage.stores.test_s3 import VERBS

pytestmark = pytest.mark.slow

DEADLINE_S = 0.6
READS = [VERBS[2], VERBS[3]]
WRITES = [VERBS[0], VERBS[1]]


def silent(connection: socket.socket) -> None:
    """Takes the request and says nothing."""
    with suppress(OSError):
        while connection.recv(65536):
            pass


def inviting(connection: socket.socket) -> None:
    """Asks for the body, takes it, and says nothing."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    silent(connection)


def deaf(connection: socket.socket) -> None:
    """Asks for the body and does not take it."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    time.sleep(5 * DEADLINE_S)


def trickling_headers(connection: socket.socket) -> None:
    """Sends an answer that never gets through its headers."""
    connection.recv(65536)
    trickle(connection, b"HTTP/1.1 200 OK\r\nX-Padding: " + b"x" * 1000)


def trickling_body(connection: socket.socket) -> None:
    """Sends the headers at once and the body byte by byte."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nETag: 1\r\nContent-Length: 1000\r\n\r\n")
    trickle(connection, b"<" * 1000)


def trickle(connection: socket.socket, answer: bytes) -> None:
    for byte in answer:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


@contextmanager
def peer(behaviour, monkeypatch: pytest.MonkeyPatch, deadline_s: float = DEADLINE_S) -> Iterator[S3Store]:
    """A store on a server of that behaviour."""
    threads = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=answer, args=(connection,)))
                threads[-1].start()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            behaviour(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        point_to(f"http://127.0.0.1:{listener.getsockname()[1]}", monkeypatch)
        acceptor = threading.Thread(target=serve)
        acceptor.start()
        store = S3Store("bucket", "run", deadline_s=deadline_s, backoff_s=0.001)
        try:
            yield store
        finally:
            store.close()
            listener.shutdown(socket.SHUT_RDWR)
    for thread in (acceptor, *threads):
        thread.join()


@pytest.mark.parametrize(
    ("behaviour", "verb"),
    [
        *((silent, verb) for verb in VERBS),
        *((trickling_headers, verb) for verb in VERBS),
        *((trickling_body, verb) for verb in READS),
        *((inviting, verb) for verb in WRITES),
    ],
)
def test_every_verb_gives_up_in_time(monkeypatch, behaviour, verb):
    with peer(behaviour, monkeypatch) as store:
        started_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"s3://bucket/run/.*no answer within [0-9.]+ s"):
            verb(store)
        # Many times what it takes: without a deadline it would never end.
        assert time.monotonic() - started_s < 60


def test_a_peer_that_says_nothing_is_asked_again_within_the_deadline(monkeypatch):
    """As after a failover: the first connection is dead, and the next one answers at once."""
    asked = []

    def silent_once(connection: socket.socket) -> None:
        asked.append(connection)
        if len(asked) == 1:
            silent(connection)
        else:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nETag: 1\r\nContent-Length: 4\r\n\r\nback")

    with peer(silent_once, monkeypatch, deadline_s=3.0) as store:
        assert store.get("a") == b"back"
    assert len(asked) == 2


def test_a_body_that_nobody_takes_is_given_up_in_time(monkeypatch):
    body = bytes(24 << 20)
    with peer(deaf, monkeypatch) as store:
        started_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match="cannot create"):
            store.create("big", body)
        assert time.monotonic() - started_s < DEADLINE_S + len(body) / budget.BYTES_PER_S_MIN + 60


class Pauses:
    """The time of storage.stores.s3: it passes in pauses only, of which each is half of what it may be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.bounds: list[float] = []
        monkeypatch.setattr(budget, "time", self)
        monkeypatch.setattr(budget.random, "uniform", self.uniform)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s

    def uniform(self, low: float, high: float) -> float:
        assert low == 0.0
        self.bounds.append(high)
        return high / 2


def test_pauses_are_random_in_full_and_bounded_and_fill_the_deadline(monkeypatch):
    """A pause is anything from nothing to a bound that doubles up to 5 s."""
    with scripted_server([(503, "SlowDown", "")]) as (endpoint, seen):
        point_to(endpoint, monkeypatch)
        store = S3Store("bucket", "run")
        pauses = Pauses(monkeypatch)
        with pytest.raises(
            StoreUnavailable, match=r"within 18\.1 s and 12 attempts, last SlowDown; a write may or may"
        ):
            store.put("a", b"x")
        store.close()
    assert len(seen) == 12
    assert pauses.bounds == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2] + [5.0] * 7)
    assert pauses.now_s == pytest.approx(18.1), "another pause of 2.5 s would end after the deadline of 20 s"


@pytest.mark.parametrize("verb", VERBS)
def test_an_outage_that_is_shorter_than_the_deadline_is_survived(monkeypatch, verb):
    nothing = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    with scripted_server([(503, "ServiceUnavailable", "")] * 10 + [(200, "", nothing)]) as (endpoint, seen):
        point_to(endpoint, monkeypatch)
        store = S3Store("bucket", "run")
        pauses = Pauses(monkeypatch)
        verb(store)
        store.close()
    assert len(seen) == 11
    assert pauses.now_s == pytest.approx(15.6)


def test_a_server_that_comes_back_on_its_port_is_found_again(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    point_to(f"http://127.0.0.1:{port}", monkeypatch)
    back = threading.Event()

    def return_late() -> None:
        time.sleep(1.5)
        with socket.create_server(("127.0.0.1", port)) as again:
            back.set()
            connection, _ = again.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nETag: 1\r\nContent-Length: 4\r\n\r\nback")

    server = threading.Thread(target=return_late)
    server.start()
    store = S3Store("bucket", "run", backoff_s=0.02)
    assert store.get("a") == b"back"
    assert back.is_set()
    store.close()
    server.join()


def test_a_body_that_breaks_off_late_is_asked_for_again(monkeypatch):
    """The time of a call grows with the bytes that it reads, not only that of its attempts."""
    body = b"x" * 60_000
    monkeypatch.setattr(budget, "BYTES_PER_S_MIN", 1_000)
    requests = []

    def breaking_off_once(connection: socket.socket) -> None:
        connection.recv(65536)
        requests.append(time.monotonic())
        connection.sendall(b"HTTP/1.1 200 OK\r\nETag: 1\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body))
        if len(requests) == 1:
            connection.sendall(body[:100])
            time.sleep(4.5)
        else:
            connection.sendall(body)

    with peer(breaking_off_once, monkeypatch, deadline_s=4) as store:
        assert store.get("a") == body
    assert len(requests) == 2


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("answer", [(503, "SlowDown", ""), (500, "InternalError", ""), (503, "ServiceUnavailable", "")])
def test_every_verb_is_tried_again(monkeypatch, verb, answer):
    nothing = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    with scripted_server([answer, (200, "", nothing)]) as (endpoint, seen):
        point_to(endpoint, monkeypatch)
        store = S3Store("bucket", "run", deadline_s=60, backoff_s=0.001)
        verb(store)
        store.close()
    assert len(seen) == 2


@pytest.mark.parametrize("verb", WRITES)
def test_a_big_body_is_one_request(monkeypatch, verb):
    """An upload in parts is not atomic everywhere: some servers ignore the condition when it is completed."""
    body = bytes(101 << 20)
    with scripted_server([(200, "", "")]) as (endpoint, seen):
        point_to(endpoint, monkeypatch)
        store = S3Store("bucket", "run")
        (store.create if verb is VERBS[0] else store.put)("big", body)
        store.close()
    assert seen == ["PUT /bucket/run/big"]


@pytest.mark.parametrize("verb", WRITES)
def test_a_body_beyond_one_request_is_refused(monkeypatch, verb):
    monkeypatch.setattr(s3, "BODY_BYTES_MAX", 0)
    with pytest.raises(ValueError, match=r"body of 'a': 1 bytes; allowed: up to 0 \(5 GiB\)"):
        verb(S3Store("bucket"))
