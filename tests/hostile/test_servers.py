"""Requests that no scraper or browser of the user's sends: an answer that refuses them, and nothing printed but a line.

A new case is a line in MALFORMED, STRANGE_HOSTS or NO_GATEWAYS.
"""

import asyncio
import logging
import socket
import struct
import threading
import time
from contextlib import contextmanager

import pytest

from resources.local_http import LOOPBACK, answers_to
from storage.clock import SystemClock
from tasks.reporting.metrics_outlets import MetricsServer, Pushgateway
from tasks.turns.agent_server import AgentServer
from tasks.viewing.page_server import PageServer

HOST = b"Host: 127.0.0.1\r\n"
MALFORMED = {
    "one word": b"GET\r\n\r\n",
    "another version": b"GET /metrics HTTP/9.9\r\n" + HOST + b"\r\n",
    "a version of no digits": b"GET /metrics HTTP/1.\xb2\r\n" + HOST + b"\r\n",
    "two versions": b"GET /metrics HTTP/1.1 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a handshake of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "zeros": b"\0" * 100 + b"\r\n\r\n",
    "a header without a colon": b"GET /metrics HTTP/1.1\r\nHost\r\n\r\n",
    "a host of bytes": b"GET /metrics HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
    "half a bracket": b"GET /metrics HTTP/1.1\r\nHost: [::1\r\n\r\n",
    "two hosts": b"GET /metrics HTTP/1.1\r\n" + HOST + b"Host: evil.example\r\n\r\n",
    "many headers": b"GET /metrics HTTP/1.1\r\n" + HOST + b"A: b\r\n" * 400 + b"\r\n",
    "a long path": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a long header": b"GET /metrics HTTP/1.1\r\n" + HOST + b"A: " + b"b" * 70_000 + b"\r\n\r\n",
    "no length": b"POST /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: x\r\n\r\n",
    "a negative length": b"POST /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: -5\r\n\r\n",
    "no chunk": b"POST /metrics HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "an address without an end": b"GET http://[/metrics HTTP/1.1\r\n" + HOST + b"\r\n",
    "bytes in the path": b"GET \xe9\x80\x80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "escapes": b"\x1b[2J \x1b]0;owned\x07 HTTP/1.1\r\n" + HOST + b"\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": b"CONNECT a:b HTTP/1.1\r\n" + HOST + b"\r\n",
    "another method": b"BREW /metrics HTTP/1.1\r\n" + HOST + b"\r\n",
}


class NoRun:
    """A reader of a run of which nothing can be read."""

    def count(self):
        return 0


@contextmanager
def metrics(text="a 1\n"):
    with MetricsServer(LOOPBACK, 0, text) as server:
        yield int(server.address.rpartition(":")[2].partition("/")[0])


@contextmanager
def in_a_loop(start):
    """A server of aiohttp in a thread of its own; start: returns its port and what closes it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port, close = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        try:
            yield port
        finally:
            asyncio.run_coroutine_threadsafe(close(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def page():
    async def start():
        server = PageServer(NoRun(), SystemClock(), 0)
        runner = await server.start()
        return int(server.address.rpartition(":")[2].partition("/")[0]), runner.cleanup

    return in_a_loop(start)


class Agent:
    """As much of a program as the server needs to admit it."""

    key = "k"

    def on_end(self, _):
        pass


def agents():
    async def start():
        server = AgentServer()
        await server.start()
        base = server.admit(Agent())
        return int(base.split(":")[2].partition("/")[0]), server.close

    return in_a_loop(start)


SERVERS = {"metrics": metrics, "page": page, "agents": agents}


def asked(port, request):
    """The status with which a request is answered; 0: the connection was closed without one."""
    with socket.create_connection((LOOPBACK, port), timeout=30) as connection:
        connection.sendall(request)
        found = b""
        try:
            while b"\n" not in found and (piece := connection.recv(4096)):
                found += piece
        except ConnectionError:
            pass
    words = found.split()
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else 0


def hang_up(port, request):
    """Send a part of a request, or all of it, and reset the connection."""
    with socket.create_connection((LOOPBACK, port), timeout=30) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(request)


def whole_request(path, host=LOOPBACK):
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_what_is_no_request_is_refused_and_nothing_is_printed(server, capfd, caplog):
    caplog.set_level(logging.WARNING)
    with server() as port:
        for name, request in MALFORMED.items():
            status = asked(port, request)
            # A connection that is reset while the request is read shows no answer.
            assert 400 <= status < 600 or (status == 0 and len(request) > 60_000), name
            assert status != 500, name
            shown = capfd.readouterr()
            assert shown.out + shown.err == "", name
        hang_up(port, b"GET /metr")
        hang_up(port, whole_request("/metrics"))
        assert asked(port, whole_request("/metrics")) in (200, 401, 403, 404)
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []


@pytest.mark.slow
def test_a_scraper_that_goes_away_is_no_news(capfd, caplog):
    with metrics("a 1\n" * 2_000_000) as port:
        for _ in range(3):
            hang_up(port, whole_request("/metrics"))
        assert asked(port, whole_request("/metrics")) == 200
        time.sleep(0.3)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_an_error_of_our_own_is_one_line(caplog):
    class Broken(str):
        __slots__ = ()

        def encode(self, *_):
            raise RuntimeError("no\nsuch text")

    with metrics(Broken()) as port:
        assert asked(port, whole_request("/metrics")) in (0, 500)
        for _ in range(100):
            if caplog.records:
                break
            time.sleep(0.05)
    [record] = caplog.records
    assert record.exc_info is None
    assert "RuntimeError" in record.getMessage()


STRANGE_HOSTS = [
    *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example@127.0.0.1"),
    *("", " ", "127.0.0.1:x", "127.0.0.1:80:80", "[127.0.0.1", "10.0.0.1", "[::2]", "0x7f000001", "2130706433"),
    *("localhost/", "127.0.0.1, evil.example", "127.0.0.1 evil.example", "\xff", "local\thost", "[evil.example]"),
]


@pytest.mark.parametrize("host", STRANGE_HOSTS)
@pytest.mark.parametrize(("bound", "address"), [("127.0.0.1", ""), ("localhost", "127.0.0.1"), ("127.0.1.1", "")])
def test_a_server_on_the_loopback_answers_no_other_name(host, bound, address):
    assert not answers_to(host, bound, address)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9464", "localhost", "LOCALHOST:1", "localhost.", "[::1]:80"])
@pytest.mark.parametrize(("bound", "address"), [("127.0.0.1", ""), ("localhost", "127.0.0.1")])
def test_a_server_on_the_loopback_answers_its_own_names(host, bound, address):
    assert answers_to(host, bound, address)


def test_a_server_answers_the_name_that_it_was_told_and_its_address():
    for host in ("gpu-7.cluster:9464", "GPU-7.cluster", "10.1.2.3", "10.1.2.3:9464"):
        assert answers_to(host, "gpu-7.cluster", "10.1.2.3")
    for host in ("localhost", "127.0.0.1", "10.1.2.4", "gpu-8.cluster", "evil.example"):
        assert not answers_to(host, "gpu-7.cluster", "10.1.2.3")


def test_a_server_at_all_addresses_answers_addresses_and_the_names_of_the_machine():
    for host in ("10.1.2.3:9464", "127.0.0.1", "localhost", "[fe80::1]:80", socket.gethostname()):
        assert answers_to(host, "0.0.0.0")
    for host in ("evil.example", f"{socket.gethostname()}.evil.example", "", "10.1.2.3.evil.example"):
        assert not answers_to(host, "0.0.0.0")


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_metrics_are_not_given_to_a_page_elsewhere(bound):
    with MetricsServer(bound, 0, "secret_metric 1\n") as server:
        port = int(server.address.rpartition(":")[2].partition("/")[0])
        for host in ("evil.example", f"evil.example:{port}", ""):
            assert asked(port, whole_request("/metrics", host)) == 403
        assert asked(port, whole_request("http://evil.example/metrics")) == 404
        assert asked(port, whole_request("/metrics", f"127.0.0.1:{port}")) == 200


NO_GATEWAYS = [
    *(
        "",
        "gateway:9091",
        "ftp://gateway",
        "http://",
        "http:///",
        "http://:9091",
        "http://gateway:port",
        "http://gateway:",
    ),
    *("http://gateway:0", "http://gateway:65536", "http://gateway:999999", "http://a:1:2", "http://[::1", "http://a b"),
    *(
        "http://gate\nway",
        "http://gate\x1bway",
        "http://gateway/\x00",
        "http://-gateway",
        "http://gate..way",
        "http://.",
    ),
    *("http://me:hunter2@gateway", "http://:hunter2@gateway", "http://hunter2@gateway", "http://gateway?x=hunter2"),
    *(
        "http://gateway#hunter2",
        "http://gateway/../x",
        "http://gateway/%2e%2e/x",
        "http://gateway\\x",
        "http://ga_te!way",
    ),
    *(
        f"http://{'a.' * 200}b",
        "http://gateway/hf_" + "a1B" * 12,
        " http://gateway",
        "http://gateway ",
        "HTTP",
        "//gateway",
    ),
]


@pytest.mark.parametrize("url", NO_GATEWAYS)
def test_what_is_no_gateway_is_refused_without_a_secret(url):
    with pytest.raises(ValueError, match=r"^--push: allowed: http://host:port") as refused:
        Pushgateway(url, "run")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://gateway:9091",
        "https://gateway/",
        "http://10.0.0.1:9091/push",
        "http://[::1]:9091",
        "HTTP://gate-way.a.b.",
    ],
)
def test_a_gateway_is_taken_as_it_was_given(url):
    assert Pushgateway(url, "run") is not None
