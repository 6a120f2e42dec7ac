"""The server of the page: who is answered, and with what."""

import asyncio
import json
import socket
from http.client import HTTPConnection

import pytest

from resources.local_http import LOOPBACK
from storage.clock import ManualClock
from storage.records import layout
from tasks.viewing.page_server import PageServer
from tasks.viewing.run_reader import RunReader
from tests.served_page import served
from tests.viewed_run import write_viewed_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_viewed_run(str(tmp_path_factory.mktemp("served") / "run"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(run):
    with served(run) as found:
        yield found


def ask(server, path, method="GET", token=True, **headers):
    """(status, headers, body) of a request to the server."""
    port = int(server.address.split(":")[2].split("/")[0])
    connection = HTTPConnection(LOOPBACK, port, timeout=60)
    try:
        connection.request(method, path, headers=({"X-Gleaner-Token": server.token} if token else {}) | headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def asked(server, path):
    status, _, body = ask(server, f"/data/{path}")
    return status, json.loads(body)


def test_the_page_is_answered_to_its_own_address_alone(server):
    path = "/" + server.address.split("/", 3)[3]
    status, headers, body = ask(server, path, token=False)
    assert status == 200
    assert body.startswith("<!doctype html>")
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert ask(server, path, token=False, Host="localhost:1")[0] == 200  # a tunnel may have another port


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"token": False}, 403, "it carries a token"),
        ({"token": False, "X-Gleaner-Token": "wrong"}, 403, "it carries a token"),
        ({"Host": "evil.example"}, 403, "the Host header names another machine"),
        ({"Host": "127.0.0.1.evil.example:80"}, 403, "the Host header names another machine"),
        ({"method": "POST"}, 405, "only GET is answered"),
        ({"method": "OPTIONS"}, 405, "only GET is answered"),
        ({"method": "HEAD"}, 405, None),
    ],
)
def test_others_learn_nothing(server, changes, status, message):
    for path in ("/", "/data/summary", "/data/responses/0/0", "/elsewhere"):
        found, headers, body = ask(server, path, **changes)
        assert found == status
        assert "access-control-allow-origin" not in headers
        assert message is None or list(json.loads(body)) == ["error"]
        assert message is None or message in body


def test_every_path_has_its_values(server):
    status, found = asked(server, "summary")
    assert status == 200
    assert [row[0] for row in found["iterations"]] == [0.375, 0.5]
    assert found["planned"] == [2]
    assert found["facts"]["so far"] == "2 iterations, 40 s, $0.5000"
    assert found["facts"]["to go"] == "98 iterations, 32 min 40 s, $24.50, at the pace of the last iterations"
    assert found["facts"]["algorithm"] == "grpo, clip"
    status, index = asked(server, "iterations/0")
    assert index["states"] == ["trained"] * 4
    assert index["prompts"][1] == {"id": "p1", "text": "user: 2+2="}
    status, view = asked(server, "responses/0/0")
    assert [stretch["end"] for stretch in view["stretches"]] == ["killed", "stop"]
    assert asked(server, "advantages/2") == (200, None)  # it is still open
    status, advantages = asked(server, "advantages/0")
    assert advantages["0"] == pytest.approx(-0.7071, abs=1e-3)
    assert asked(server, "responses/0/0")[1]["advantage"] == advantages["0"]
    assert [logprob for _, logprob in asked(server, "tokens/0/0/2")[1]] == [-1.5] * 3
    texts = ["".join(stretch["text"] for stretch in asked(server, f"responses/0/{n}")[1]["stretches"]) for n in (3, 0)]
    assert asked(server, "texts/0/3/0") == (200, texts)
    assert asked(server, "prompts/p0") == (200, [[0, 0], [1, 0], [2, 0]])
    assert asked(server, "prompts/%2e%2e") == (200, [])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("iterations/9", "iteration: value 9; "),
        ("responses/0/9", "response: value 9; allowed: 0 to 3"),
        ("responses/0/-1", "path: value 'responses/0/-1'; allowed: summary"),
        ("texts/0/1/4", "response: value 4; allowed: 0 to 3"),
        ("texts/0", "path: value 'texts/0'; allowed: summary"),
        ("texts/0" + "/1" * 51, "path: value 'texts/0/1/"),
        ("responses/0", "path: value 'responses/0'; allowed: summary"),
        ("../run.json", "path: value '../run.json'; allowed: summary"),
        ("nothing", "path: value 'nothing'; allowed: summary"),
    ],
)
def test_what_the_run_does_not_have_is_said_in_one_line(server, path, message):
    status, found = asked(server, path)
    assert status == 404
    assert message in found["error"]
    assert "\n" not in found["error"]


def test_a_port_in_use_is_refused_in_one_line(run):
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port: value {port}; it cannot be used .*; allowed: a free port"):
            asyncio.run(PageServer(RunReader(run), ManualClock(), port).start())


def test_an_iteration_of_another_format_is_said_in_one_line(tmp_path):
    (tmp_path / "model").mkdir()
    store = write_viewed_run(str(tmp_path / "run"), tmp_path / "model")
    store.put(layout.plan(1), store.get(layout.plan(1)).replace(b'"format":1,', b'"format":8,'))
    with served(store) as server:
        status, found = asked(server, "iterations/1")
        assert status == 500
        assert found["error"].endswith("format 8; this version of Gleaner reads format 1")
        assert asked(server, "iterations/0")[0] == 200


def test_a_run_that_is_deleted_meanwhile_is_said(tmp_path):
    (tmp_path / "model").mkdir()
    store = write_viewed_run(str(tmp_path / "run"), tmp_path / "model")
    with served(store) as server:
        assert asked(server, "responses/1/0")[0] == 200
        for key in store.list(""):
            store.delete(key)
        for path in ("summary", "responses/1/0", "iterations/0"):
            status, found = asked(server, path)
            assert status in (404, 500), path
            assert list(found) == ["error"]
        assert ask(server, "/")[0] == 500
        assert layout.RUN in ask(server, "/")[2]
