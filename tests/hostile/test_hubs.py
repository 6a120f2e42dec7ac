"""Hubs that answer what no hub does: refused by name, within a time, and nothing lies outside of the cache.

A new case is a line in WRONG.
"""

import gzip
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from tasks.hub.careful_client import DOCUMENT_BYTES_MAX
from tasks.hub.repositories import HubError, commit_of, explained, model_folder
from tests.hub_server import Hub, pointed_to

REPO, COMMIT = "Owner/Model", "d6cd1e2bd19e03a81132a23b2025920577f84e37"
BODY = b"{}" + b" " * 98


def info(**changes):
    """What a hub says of a repository."""
    return {
        "id": REPO,
        "_id": REPO,
        "sha": COMMIT,
        "siblings": [{"rfilename": "model.safetensors"}],
        "tags": [],
    } | changes


ENTRY = {"type": "file", "path": "model.safetensors", "oid": "0" * 40, "size": len(BODY)}
# What a hub answers in place of the right: "info", "tree", "headers" of a file, "body", or "again".
WRONG = {
    "a commit of null": {"info": info(sha=None)},
    "a commit of a path": {"info": info(sha="../../x")},
    "a commit of a number": {"info": info(sha=5)},
    "no object": {"info": []},
    "null": {"info": None},
    "a name that leads out": {"info": info(siblings=[{"rfilename": "../../../x.safetensors"}])},
    "an absolute name": {"info": info(siblings=[{"rfilename": "/tmp/x.safetensors"}])},
    "an etag that leads out": {"headers": {"ETag": '"../../../../../x"'}},
    "an etag of one part": {"headers": {"ETag": '".."'}},
    "an absolute etag": {"headers": {"ETag": '"/tmp/gleaner-outside"'}},
    "a weak etag that leads out": {"headers": {"ETag": 'W/"../../x"'}},
    "a linked etag that leads out": {"headers": {"X-Linked-ETag": '"../../../x"', "X-Linked-Size": "100"}},
    "no etag": {"headers": {"ETag": None}},
    "a commit of a file that leads out": {"headers": {"X-Repo-Commit": "../../../x"}},
    "a body that ends early": {"body": ("closed", 10)},
    "a body that stalls": {"body": ("open", 10)},
    "an empty body": {"body": ("closed", 0)},
    "a hub that asks to wait for a day": {"again": {"Retry-After": "86400"}},
    "a limit of a day": {"again": {"RateLimit": '"api";r=0;t=86400'}},
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer()

    def answer(self):
        wrong = self.server.wrong
        if "again" in wrong:
            self.send(429, b"", wrong["again"])
        elif "/tree/" in self.path or "/paths-info/" in self.path:
            self.send(200, json.dumps(wrong.get("tree", [ENTRY])).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith("/api/") and "packed" in wrong:
            self.send(200, wrong["packed"], {"Content-Type": "application/json", "Content-Encoding": "gzip"})
        elif self.path.startswith("/api/"):
            self.send(200, json.dumps(wrong.get("info", info())).encode(), {"Content-Type": "application/json"})
        else:
            usual = {"ETag": f'"{"0" * 40}"', "X-Repo-Commit": COMMIT}
            headers = {name: value for name, value in (usual | wrong.get("headers", {})).items() if value is not None}
            self.send(200, BODY, headers)

    def send(self, status, body, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        end, count = (
            self.server.wrong.get("body", ("whole", len(body))) if "/resolve/" in self.path else ("", len(body))
        )
        self.wfile.write(body[:count])
        self.wfile.flush()
        if end == "open":
            self.server.released.wait(60)
        self.close_connection = bool(end)


@contextmanager
def hub(wrong):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.wrong, server.released = wrong, threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def read():
    commit = commit_of("model", REPO, None, "policy.path")
    model_folder(REPO, commit, "policy.path")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_hub_that_answers_wrongly_is_refused_by_name_in_time(tmp_path, wrong):
    home = tmp_path / "deep" / "er" / "home"
    home.mkdir(parents=True)
    began_s = time.monotonic()
    with hub(wrong) as running, pointed_to(running, home), pytest.raises(HubError) as refused:
        read()
    assert str(refused.value).startswith("policy.path: ")
    assert len(str(refused.value).splitlines()) == 1
    assert "is damaged" not in str(refused.value)
    # The library alone would wait for 40 s and more, or for a day.
    assert time.monotonic() - began_s < 35
    outside = files_below(tmp_path) - {f"deep/er/home/{each}" for each in files_below(home)}
    assert outside == set()


@pytest.mark.slow
def test_what_a_hub_says_in_few_bytes_is_not_unpacked_without_a_limit(tmp_path):
    with hub({"packed": gzip.compress(json.dumps(info()).encode())}) as running, pointed_to(running, tmp_path):
        assert commit_of("model", REPO, None, "policy.path") == COMMIT
    blanks = gzip.compress(b" " * (DOCUMENT_BYTES_MAX + 1))
    assert len(blanks) < 1 << 20
    with (
        hub({"packed": blanks}) as running,
        pointed_to(running, tmp_path),
        pytest.raises(HubError, match="longer than 67108864 bytes"),
    ):
        read()


# Where large files come by another way, the library names them by what the list of files says.
TREES = {
    "a digest of a path": ENTRY | {"oid": "../../../x"},
    "a digest of a large file that is a path": ENTRY | {"lfs": {"oid": "../../../x", "size": 5, "pointerSize": 5}},
    "a path that leads out": ENTRY | {"path": "a/../../x.safetensors"},
    "an absolute path": ENTRY | {"path": "/tmp/x"},
}


@pytest.mark.slow
@pytest.mark.parametrize("entry", TREES.values(), ids=TREES)
def test_a_list_of_files_with_names_that_lead_out_is_refused(tmp_path, entry):
    def files():
        with explained("model", REPO, COMMIT, "policy.path"):
            return [each.path for each in huggingface_hub.HfApi().list_repo_tree(REPO, revision=COMMIT)]

    with hub({}) as running, pointed_to(running, tmp_path):
        assert files() == ["model.safetensors"]
    with hub({"tree": [entry]}) as running, pointed_to(running, tmp_path), pytest.raises(HubError, match="WrongAnswer"):
        files()
