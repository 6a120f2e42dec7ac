"""S3 servers for tests: moto in a thread, and one that answers what it is told to.

moto alone is not atomic under concurrent requests, so they are handled one at a time. All servers have one user.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

S3_BUCKET = "gleaner-test"
AWS_NAMES = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_S3_ADDRESSING_STYLE",
    "FLYTE_AWS_ENDPOINT",
    "FLYTE_AWS_ACCESS_KEY_ID",
    "FLYTE_AWS_SECRET_ACCESS_KEY",
    "FLYTE_AWS_ADDRESSING_STYLE",
)
KEY, SECRET = "test", "a-secret-that-no-message-may-show"
SERVER_ERROR = (
    b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>the answer is lost on purpose</Message></Error>"
)


class SerialisedMoto:
    """WSGI application: moto behind one lock. A PUT of a key that contains a part of `lost` is applied, then denied."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application = application
        self.lock = threading.Lock()
        self.lost: set[str] = set()

    def __call__(self, environment: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        started: list[Any] = []

        def hold(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> None:
            started[:] = [status, headers]

        with self.lock:
            body = b"".join(self.application(environment, hold))
            hit = next((part for part in self.lost if part in environment["PATH_INFO"]), None)
            if hit is not None and environment["REQUEST_METHOD"] == "PUT":
                self.lost.discard(hit)
                started[:] = ["500 Internal Server Error", [("Content-Length", str(len(SERVER_ERROR)))]]
                body = SERVER_ERROR
            start_response(*started)
            return [body]


class Gate(SerialisedMoto):
    """Refuses the next `refusals` requests with `code`, and all that `refused` keys have signed.

    asked, denied: how many requests came, and how many were refused. trap: keys that are refused once an object has
    been written whose name contains the text.
    """

    code = "ExpiredToken"
    refusals = 0
    refused: frozenset[str] = frozenset()
    asked = denied = 0
    trap: tuple[str, frozenset[str]] | None = None

    def __call__(self, environment: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        signed = environment.get("HTTP_AUTHORIZATION", "")
        is_refused = any(f"={key}/" in signed for key in self.refused)
        self.asked += 1
        if not is_refused and not self.refusals:
            if self.trap and self.trap[0] in environment["PATH_INFO"] and environment["REQUEST_METHOD"] == "PUT":
                self.refused, self.trap = self.trap[1], None
            return super().__call__(environment, start_response)
        self.denied += 1
        self.refusals -= not is_refused
        environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        body = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>scripted</Message></Error>".encode()
        start_response("400 Bad Request", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


def write_keys(file: Path, key: str) -> None:
    whole = file.with_name("new")
    whole.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")
    whole.replace(file)


def point_to(endpoint: str, environment: pytest.MonkeyPatch) -> None:
    """Let S3Store meet this server, and nothing else of the machine's configuration."""
    for name in AWS_NAMES:
        environment.delenv(name, raising=False)
    environment.setenv("AWS_ENDPOINT_URL", endpoint)
    environment.setenv("AWS_ACCESS_KEY_ID", KEY)
    environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
    environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
    environment.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    environment.setenv("AWS_CONFIG_FILE", "/nonexistent")


def make_bucket(endpoint: str) -> None:
    import boto3  # noqa: PLC0415 - comes with moto, and takes a second that few tests need

    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=S3_BUCKET)
    client.close()


@contextmanager
def moto_server(kind: type[SerialisedMoto] = SerialisedMoto) -> Iterator[tuple[str, SerialisedMoto]]:
    """(endpoint URL, application) of a running server on a free port of the loopback interface."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moto.moto_server.werkzeug_app import (  # noqa: PLC0415 - takes seconds, which few tests need
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server  # noqa: PLC0415

        application = kind(DomainDispatcherApplication(create_backend_app))
    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    class KeepAlive(MotoRequestHandler):
        protocol_version = "HTTP/1.1"

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=KeepAlive)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", application
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def scripted_server(
    answers: list[tuple[int, str, str]], refused_header: str = "", checksum: str | None = None, is_s3: bool = True
) -> Iterator[tuple[str, list[str]]]:
    """(endpoint URL, requests so far) of a server that gives `answers` (status, error code, extra XML) in order.

    The last answer is repeated. A status below 300 carries `extra` as the body, with an ETag, and is 204 of a deletion.
    A request without a header whose name holds `refused_header` is answered with 200 and an empty body. `checksum` is
    stated as the CRC32 of every body. Without `is_s3` all is answered as a portal's page is: `extra` as HTML, of the
    status as it stands, without an ETag.
    """
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, code, extra = answers[min(len(seen), len(answers) - 1)]
            if not any(refused_header in name.lower() for name in self.headers):
                status, code, extra = 200, "", ""
            seen.append(f"{self.command} {self.path}")
            error = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>scripted</Message>{extra}</Error>"
            body = extra.encode() if status < 300 or not is_s3 else error.encode()
            is_deletion = is_s3 and status < 300 and self.command == "DELETE"
            self.send_response(204 if is_deletion else status)
            if is_s3 and status < 300:
                self.send_header("ETag", '"scripted"')
            elif not is_s3:
                self.send_header("Content-Type", "text/html; charset=utf-8")
            body = b"" if is_deletion else body
            self.send_header("Content-Length", str(len(body)))
            if checksum is not None:
                self.send_header("x-amz-checksum-crc32", checksum)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    for verb in ("PUT", "GET", "DELETE", "HEAD"):
        setattr(Handler, f"do_{verb}", Handler.answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
