"""Serves the page of a run to the browser of the user who started it, and to no other page or program.

It binds 127.0.0.1, answers GET alone, refuses a Host header of another name (which a page elsewhere would send if its
name were pointed here), and asks for the token that the printed address carries.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from resources.local_http import LOOPBACK, WithoutTracebacks, answers_to
from resources.visible_text import visible
from storage.clock import Clock
from storage.stores.store import StorageError
from tasks.viewing.page_data import encode, page_data
from tasks.viewing.page_file import content_policy, render_page
from tasks.viewing.run_reader import RunReader

log = logging.getLogger(__name__)
TOKEN_HEADER = "X-Gleaner-Token"  # noqa: S105 - the name of a header
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageServer:
    """The server of one run's page; `address` is what the user opens."""

    def __init__(self, reader: RunReader, clock: Clock, port: int) -> None:
        self._reader = reader
        self._clock = clock
        self._port = port
        self.token = secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self._port}/?token={self.token}"

    async def start(self) -> web.AppRunner:
        """Listen; returns what `cleanup` stops. Raises OSError, which says so, if the port is in use."""
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/", self._page)
        app.router.add_get("/data/{path:.+}", self._data)
        runner = web.AppRunner(app, access_log=None, logger=WithoutTracebacks(log))
        await runner.setup()
        site = web.TCPSite(runner, LOOPBACK, self._port)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise OSError(
                f"port: value {self._port}; it cannot be used ({error.strerror}); allowed: a free port"
            ) from None
        if not self._port:
            self._port = runner.addresses[0][1]
        # What the page asks for first is read while the user still opens it.
        asyncio.get_running_loop().run_in_executor(None, self._read_ahead)
        return runner

    def _read_ahead(self) -> None:
        with suppress(StorageError, LookupError, ValueError, OSError):
            count = self._reader.count()
            if count:
                self._read(f"iterations/{count - 1}")

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what does not come from the page; never say anything of the run to it."""
        given = request.headers.get(TOKEN_HEADER) or request.query.get("token", "")
        if request.method != "GET":
            found: web.StreamResponse = _refusal(405, "only GET is answered")
        elif not answers_to(request.headers.get("Host"), LOOPBACK):
            found = _refusal(403, "the Host header names another machine")
        elif not hmac.compare_digest(given.encode(errors="replace"), self.token.encode()):
            found = _refusal(403, "open the address that `gleaner view` printed: it carries a token")
        else:
            try:
                found = await handler(request)
            except web.HTTPException:
                found = _refusal(404, "there is no such page")
        found.headers.update(
            {
                "Content-Security-Policy": content_policy(connects=True) + "; frame-ancestors 'none'",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "no-store",
            }
        )
        return found

    async def _page(self, _: web.Request) -> web.Response:
        try:
            text = await asyncio.to_thread(lambda: render_page(self._read("summary")))
        except (StorageError, LookupError, ValueError, OSError) as error:
            return web.Response(text=f"gleaner: {visible(str(error))}\n", status=500, content_type="text/plain")
        return web.Response(text=text, content_type="text/html")

    async def _data(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        try:
            body = await asyncio.to_thread(lambda: encode(self._read(path)))
        except LookupError as error:
            return _refusal(404, str(error.args[0] if error.args else error))
        except (StorageError, ValueError, OSError) as error:
            return _refusal(500, str(error))
        return web.Response(text=body, content_type="application/json")

    def _read(self, path: str) -> Any:
        return page_data(self._reader, self._clock, path)


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": visible(message)}, status=status)
