"""The port and the push: what a scraper, another page, a gateway and a dead gateway meet."""

import base64
import http.client
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tasks.reporting.metrics_outlets import MetricsServer, Pushgateway, push, read_address, serve


def get(server, path="/metrics", host=None):
    port = int(server.address.rpartition(":")[2].partition("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    finally:
        connection.close()


def test_a_scrape_gets_the_last_text():
    with MetricsServer("127.0.0.1", 0, "a 1\n") as server:
        assert get(server) == (200, "a 1\n", "text/plain; version=0.0.4; charset=utf-8")
        server.text = "a 2\n"
        assert get(server, "/metrics?x=y")[:2] == (200, "a 2\n")
        assert get(server, "/")[:2] == (404, "see /metrics\n")


def test_a_page_elsewhere_whose_name_points_here_reads_nothing():
    with MetricsServer("127.0.0.1", 0, "a 1\n") as server:
        assert get(server, host="evil.example:80")[0] == 403
        assert get(server, host="localhost:80")[0] == 200
    with MetricsServer("0.0.0.0", 0, "a 1\n") as server:
        assert get(server, host="10.1.2.3:80")[0] == 200
        assert get(server, host="watcher.cluster:80")[0] == 403


def test_the_looks_are_served_until_they_end():
    told, seen = [], []

    def looks():
        yield "a 1\n"
        [line] = told
        port = int(line.split(":")[2].split("/")[0])
        for text in ("a 2\n", "a 3\n"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/metrics")
            seen.append(connection.getresponse().read().decode())
            connection.close()
            yield text

    serve(looks(), ("127.0.0.1", 0), told.append)
    assert seen == ["a 1\n", "a 2\n"]


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"^--serve: value 127\.0\.0\.1:{port}; it cannot be used \(.+\)$"):
            MetricsServer("127.0.0.1", port, "")


@pytest.mark.parametrize(
    ("text", "address"),
    [("9464", ("127.0.0.1", 9464)), ("0.0.0.0:9464", ("0.0.0.0", 9464)), ("localhost:0", ("localhost", 0))],
)
def test_addresses(text, address):
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["", "port", ":9464", "65536", "-1", "a:b:1", "http://x:1"])
def test_what_is_no_address_is_one_line(text):
    with pytest.raises(ValueError, match=r"^--serve: value '.*'; allowed: PORT \(on 127\.0\.0\.1\) or HOST:PORT"):
        read_address(text)


@contextmanager
def gateway(status=200):
    """A server that notes what is pushed: its address, and (method, path, body) of each push."""
    pushed = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            pushed.append((self.command, self.path, body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", pushed
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_push_replaces_the_metrics_of_its_run_alone():
    url = "s3://bucket/my run?"
    with gateway() as (address, pushed):
        push(["a 1\n", "a 2\n"], Pushgateway(f"{address}/", url), pytest.fail)
    [(method, path, first), (_, _, second)] = pushed
    assert (method, first, second) == ("PUT", "a 1\n", "a 2\n")
    head, _, run = path.rpartition("/")
    assert head == "/metrics/job/gleaner/run@base64"
    assert base64.urlsafe_b64decode(run).decode() == url


def test_a_gateway_that_refuses_is_told_once_and_asked_again():
    told = []
    with gateway(status=500) as (address, pushed):
        push(["a 1\n", "a 2\n"], Pushgateway(address, "run"), told.append)
        assert len(pushed) == 2
        assert told == [f"gleaner: --push: {address}: HTTP Error 500: Internal Server Error; trying again"]
        with pytest.raises(OSError, match="HTTP Error 500"):
            Pushgateway(address, "run").push("a 1\n")


def test_a_gateway_that_is_not_there_is_one_line():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(OSError, match=f"^--push: {address}: .*refused"):
        Pushgateway(address, "run").push("a 1\n")


@pytest.mark.parametrize(
    "url", ["gateway:9091", "ftp://gateway", "http://", "http://me:secret@gateway", "http://a?b=c"]
)
def test_what_is_no_gateway_is_one_line_without_its_secret(url):
    with pytest.raises(ValueError, match=r"^--push: allowed: http://host:port") as error:
        Pushgateway(url, "run")
    assert "secret" not in str(error.value)
