"""The server of agents: each agent has an address and a key of its own on the member's machine.

The server binds 127.0.0.1, and refuses a foreign Host header, which a page in a browser would send. Keys are random,
new in each life of an agent, and stored nowhere.
"""

import hmac
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web

from resources.local_http import WithoutTracebacks, answers_to
from tasks.turns import chat_reply
from tasks.turns.agent_program import AgentProgram
from tasks.turns.chat_request import Refusal, read_request
from tasks.turns.environment_worker import LOOPBACK
from tasks.turns.unreadable_body import BODY_BYTES_MAX, UNREADABLE, unreadable

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AgentServer:
    """The server of a process. One event loop uses it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._programs: dict[str, AgentProgram] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(middlewares=[_guarded], client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/{number}/v1/chat/completions", self._completed)
        app.router.add_get("/{number}/v1/models", self._models)
        # A member that ends does not wait for agents, and their requests need not be logged.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, logger=WithoutTracebacks(log))
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        self._port = self._runner.addresses[0][1]

    def admit(self, program: AgentProgram) -> str:
        """Answer the requests of a program from now on; its base URL."""
        number = str(next(self._numbers))
        self._programs[number] = program
        program.on_end(lambda: self._programs.pop(number, None))
        return f"http://{LOOPBACK}:{self._port}/{number}/v1"

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._program(request)
        return web.json_response(chat_reply.models())

    async def _completed(self, request: web.Request) -> web.StreamResponse:
        program = self._program(request)
        asked = read_request(await request.read())
        completion = await program.ask(asked, lambda: request.transport is None or request.transport.is_closing())
        if not asked.stream:
            return web.json_response(chat_reply.whole(completion, asked))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        with suppress(ConnectionError):  # an agent need not read to the end
            await response.prepare(request)
            for event in chat_reply.stream(completion, asked):
                await response.write(event)
            await response.write_eof()
        return response

    def _program(self, request: web.Request) -> AgentProgram:
        """The program whose address and key a request has; raises Refusal."""
        program = self._programs.get(request.match_info["number"])
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        key = program.key if program is not None else ""
        is_right = hmac.compare_digest(given.strip().encode(errors="replace"), key.encode())
        if program is None or kind.lower() != "bearer" or not is_right:
            message = "the API key does not belong to this address, or the response at it has ended"
            raise Refusal(message, code="invalid_api_key", status=401)
        return program


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer refused requests in the form that OpenAI's clients read."""
    try:
        if answers_to(request.headers.get("Host"), LOOPBACK):
            return await handler(request)
        refusal = Refusal("the Host header names another machine", status=403)
    except Refusal as error:
        refusal = error
    except UNREADABLE as error:
        refusal = unreadable(error)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: not served; allowed: POST .../v1/chat/completions"
        refusal = Refusal(message, code="unknown_url", status=error.status)
    return web.json_response(chat_reply.refused(refusal), status=refusal.status)
