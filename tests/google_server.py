"""A server for tests that speaks as much of Google Cloud Storage's XML API as obstore does, on the loopback.

It honours the generation that a write asks for, or ignores it, as some emulators do.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "gleaner-test"
PAGE_KEYS = 50
_DATE = "2026-11-24T00:00:00.000Z"


class GoogleObjects:
    """The objects of one bucket; `honours`: whether a write looks at the generation that it asks for."""

    def __init__(self, *, honours: bool = True) -> None:
        self.honours = honours
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.lock = threading.Lock()
        self.generation = 0

    def put(self, key: str, body: bytes, asked: str | None) -> tuple[int, dict[str, str]]:
        with self.lock:
            if self.honours and asked is not None and int(asked) != self.objects.get(key, (0, b""))[0]:
                return 412, {}
            self.generation += 1
            self.objects[key] = (self.generation, body)
            return 200, self.headers(self.generation)

    def get(self, key: str, asked: str | None) -> tuple[int, dict[str, str], bytes]:
        with self.lock:
            found = self.objects.get(key)
        if found is None:
            return 404, {}, b""
        generation, body = found
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
        if span is None:
            return 200, self.headers(generation), body
        first, last = int(span[1]), min(int(span[2] or len(body)), len(body) - 1)
        if first >= len(body):
            return 416, {}, b""
        part = {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
        return 206, self.headers(generation) | part, body[first : last + 1]

    def delete(self, key: str) -> int:
        with self.lock:
            return 404 if self.objects.pop(key, None) is None else 204

    def page(self, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        after = max(query.get("start-after", [""])[0], query.get("continuation-token", [""])[0])
        with self.lock:
            keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
            rows = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key][1])}</Size>"
                f"<LastModified>{_DATE}</LastModified><ETag>{self.objects[key][0]}</ETag></Contents>"
                for key in keys[:PAGE_KEYS]
            )
        more = ""
        if len(keys) > PAGE_KEYS:
            more = f"<NextContinuationToken>{escape(keys[PAGE_KEYS - 1])}</NextContinuationToken>"
        return f"<ListBucketResult>{rows}{more}</ListBucketResult>".encode()

    @staticmethod
    def headers(generation: int) -> dict[str, str]:
        return {"ETag": f'"{generation}"', "x-goog-generation": str(generation), "Last-Modified": HTTP_DATE}


HTTP_DATE = "Tue, 24 Nov 2026 00:00:00 GMT"


class Handler(BaseHTTPRequestHandler):
    objects: GoogleObjects
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, headers = self.objects.put(self.key(), body, self.headers.get("x-goog-if-generation-match"))
        self.reply(status, headers)

    def do_GET(self) -> None:
        if not self.key():
            self.reply(200, {}, self.objects.page(parse_qs(urlsplit(self.path).query)))
        else:
            self.reply(*self.objects.get(self.key(), self.headers.get("Range")))

    def do_HEAD(self) -> None:
        self.reply(*self.objects.get(self.key(), None))

    def do_DELETE(self) -> None:
        self.reply(self.objects.delete(self.key()), {})

    def key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").removeprefix("/")

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 64


@contextmanager
def google_server(objects: GoogleObjects) -> Iterator[str]:
    """The endpoint of a running server."""
    server = Server(("127.0.0.1", 0), type("Served", (Handler,), {"objects": objects}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
