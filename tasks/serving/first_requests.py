"""An end to the wait for a connection's first request, for which aiohttp itself waits for ever.

A connection takes a file descriptor before its client has shown a key. The wait for each later request of a connection
is aiohttp's own, with `keepalive_timeout` as its end.
"""

import asyncio
import math
from collections.abc import AsyncIterator

from aiohttp import web

_LOOKS_PER_LIMIT = 4


class FirstRequests:
    """Closes connections without a complete head of a first request. One event loop uses it."""

    def __init__(self, limit_s: float) -> None:
        """limit_s: seconds from the connection to the end of the head; a look may come half of it late."""
        self._limit_s = limit_s
        self._until_s: dict[web.RequestHandler, float] = {}

    def came(self, request: web.Request) -> None:
        """Note a request, whose connection is left alone from now on."""
        self._until_s[request.protocol] = math.inf

    async def watched(self, runner: web.AppRunner) -> AsyncIterator[None]:
        """Watch the connections of a runner; a context of its application's `cleanup_ctx`."""
        watching = asyncio.create_task(self._watch(runner))
        yield
        watching.cancel()

    async def _watch(self, runner: web.AppRunner) -> None:
        clock = asyncio.get_running_loop()
        while True:
            now_s, known = clock.time(), self._until_s
            connections = [] if runner.server is None else runner.server.connections
            self._until_s = {each: known.get(each, now_s + self._limit_s) for each in connections}
            for connection, until_s in self._until_s.items():
                if now_s >= until_s:
                    connection.force_close()
            await asyncio.sleep(self._limit_s / _LOOKS_PER_LIMIT)
