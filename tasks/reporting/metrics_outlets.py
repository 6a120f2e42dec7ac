"""Where a run's metrics go: to a scraper that asks a port of this machine, or to a Pushgateway."""

import base64
import http.client
import logging
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from resources.local_http import LOOPBACK, answers_to
from resources.secret_text import secret_in
from tasks.reporting.exposition import CONTENT_TYPE

log = logging.getLogger(__name__)
TIME_LIMIT_S = 10.0
HOST_CHARACTERS_MAX = 253
PORT_MAX = 65535
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_GATEWAY = re.compile(
    rf"https?://(?P<host>{_LABEL}(?:\.{_LABEL})*\.?|\[[0-9a-fA-F:.]+\])(?::(?P<port>\d{{1,5}}))?"
    r"(?P<path>(?:/[A-Za-z0-9._~-]*)*)",
    re.IGNORECASE,
)


def read_address(text: str, option: str = "--serve") -> tuple[str, int]:
    """(host, port) of PORT or HOST:PORT; raises ValueError, which names the option."""
    match = re.fullmatch(r"(?:([A-Za-z0-9.-]+):)?(\d{1,5})", text)
    if match is None or int(match[2]) > PORT_MAX:
        raise ValueError(
            f"{option}: value {text!r}; allowed: PORT (on {LOOPBACK}) or HOST:PORT; port 0: any that is free"
        )
    return match[1] or LOOPBACK, int(match[2])


class _QuietServer(ThreadingHTTPServer):
    """A server without a line in the log for a client that goes away."""

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - as socketserver calls it
        """A client that goes away is no news; anything else is a line."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("a request cannot be answered: %s: %s", type(error).__name__, error)


class MetricsServer:
    """Answers GET /metrics with `text`, to the names and addresses at which it listens, and to no other."""

    def __init__(self, host: str, port: int, text: str) -> None:
        """Raises OSError, which says so, if the address cannot be used."""
        self.text = text
        self._host = host
        try:
            self._server = _QuietServer((host, port), self._handler())
        except OSError as error:
            raise OSError(f"--serve: value {host}:{port}; it cannot be used ({error.strerror})") from None
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"http://{self._host}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            timeout = TIME_LIMIT_S
            # Else what is no HTTP is answered without a status.
            default_request_version = "HTTP/1.0"
            error_message_format = "%(code)d %(message)s\n"
            error_content_type = "text/plain; charset=utf-8"

            def do_GET(self) -> None:
                hosts = self.headers.get_all("Host") or [""]
                if len(hosts) > 1:
                    self._answer(400, "more than one Host header\n")
                elif not answers_to(str(hosts[0]), owner._host, str(owner._server.server_address[0])):
                    self._answer(403, "the Host header names another machine\n")
                elif self.path.partition("?")[0] != "/metrics":
                    self._answer(404, "see /metrics\n")
                else:
                    self._answer(200, owner.text)

            def _answer(self, status: int, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """A scrape is no news."""

        return Handler


def serve(texts: Iterable[str], address: tuple[str, int], say: Callable[[str], None]) -> None:
    """Serve the newest of `texts`, an iterator over time, until the iterator ends."""
    looks = iter(texts)
    with MetricsServer(*address, text=next(looks)) as server:
        say(f"metrics at {server.address} (Ctrl-C ends)")
        for text in looks:
            server.text = text


def _names_gateway(url: str) -> bool:
    match = _GATEWAY.fullmatch(url)
    if match is None:
        return False
    port, path = match["port"], match["path"] or ""
    is_port = port is None or 0 < int(port) <= PORT_MAX
    return is_port and len(match["host"]) <= HOST_CHARACTERS_MAX and not {".", ".."} & set(path.split("/"))


class Pushgateway:
    """Takes the metrics of one run; those of other runs stay as they are."""

    def __init__(self, url: str, run_url: str) -> None:
        """Raises ValueError unless `url` is http(s)://host[:port][/path]. The path names a group of the run's own."""
        if not _names_gateway(url) or secret_in(url) is not None:
            raise ValueError("--push: allowed: http://host:port or https://host:port, without a user or a password")
        run = base64.urlsafe_b64encode(run_url.encode()).decode()
        self._url = url
        self._group = f"{url.rstrip('/')}/metrics/job/gleaner/run@base64/{run}"

    def push(self, text: str) -> None:
        """Replace what it has of the run; raises OSError."""
        request = urllib.request.Request(self._group, text.encode(), {"Content-Type": CONTENT_TYPE}, method="PUT")  # noqa: S310 - http or https, see above
        try:
            with urllib.request.urlopen(request, timeout=TIME_LIMIT_S):  # noqa: S310
                return
        except (OSError, http.client.HTTPException) as error:
            raise OSError(f"--push: {self._url}: {error}") from None


def push(texts: Iterable[str], gateway: Pushgateway, say: Callable[[str], None]) -> None:
    """Push each text. A gateway that does not answer is told once, and gets the next one."""
    fails = False
    for text in texts:
        try:
            gateway.push(text)
        except OSError as error:
            if not fails:
                say(f"gleaner: {error}; trying again")
            fails = True
        else:
            fails = False
