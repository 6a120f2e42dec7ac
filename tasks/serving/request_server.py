"""The server of `gleaner serve`: takes requests of clients that know its key, and answers when responses have ended.

It refuses a Host header of another name, which a page in a browser would send, and asks for the key before it reads a
body. A request with an Idempotency-Key is recorded before anything is generated, so every life of the server gives it
the same answer.
"""

import asyncio
import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal
from weakref import WeakKeyDictionary

from aiohttp import web

from resources.local_http import WithoutTracebacks, answers_to
from resources.visible_text import visible
from storage.digests import digest_of
from storage.errors import GleanerError
from tasks.configuration.sampling import SamplingConfig
from tasks.serving.answers import chat_answer, chat_stream, text_answer
from tasks.serving.first_requests import FirstRequests
from tasks.serving.request_book import RequestBook
from tasks.serving.served_model import ServedModel
from tasks.serving.served_request import ServedRequest, read_served
from tasks.serving.tinker_door import TinkerDoor, keys_of
from tasks.serving.windows import Answer, check_room
from tasks.turns import chat_reply
from tasks.turns.chat_request import Refusal
from tasks.turns.unreadable_body import BODY_BYTES_MAX, UNREADABLE, unreadable

log = logging.getLogger(__name__)
# For the head of a connection's first request, and for each body.
REQUEST_TIMEOUT_S = 30.0
# For which a connection without a request stays open.
KEEPALIVE_S = 75.0
_LOOK_INTERVAL_S = 0.2
_KEY = re.compile(r"[!-~]{1,255}")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Kind = Literal["text", "chat"]


class RequestServer:
    """One listening server; `start` opens the port."""

    def __init__(
        self,
        book: RequestBook,
        model: ServedModel,
        sampling: SamplingConfig,
        *,
        secret: str,
        timeout_s: float,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """secret: the clients' API key. timeout_s: for an answer. request_timeout_s: for a first head, for a body."""
        self._book, self._model, self._sampling = book, model, sampling
        self._secret, self._timeout_s, self._request_timeout_s = secret, timeout_s, request_timeout_s
        self._first_requests = FirstRequests(request_timeout_s)
        self._host, self._number_waiting = "", 0
        self._awaiting: WeakKeyDictionary[Future[Answer], asyncio.Future[Answer]] = WeakKeyDictionary()
        self._tinker = TinkerDoor(book, model, sampling, read=self._body, find=self._found)

    async def start(self, host: str, port: int) -> web.AppRunner:
        """Listen; returns what `cleanup` stops. Raises OSError, which says so, if the address cannot be used."""
        self._host = host
        app = web.Application(middlewares=[self._guarded], client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/v1/completions", self._completed)
        app.router.add_post("/v1/chat/completions", self._chatted)
        app.router.add_get("/v1/models", self._models)
        app.router.add_routes(self._tinker.routes())
        # A client that has gone waits no more; its request goes on, and its key finds the answer.
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=0,
            logger=WithoutTracebacks(log),
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_S,
        )
        app.cleanup_ctx.append(lambda _: self._first_requests.watched(runner))
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise OSError(f"--listen: value {host}:{port}; it cannot be used ({error.strerror})") from None
        return runner

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer refused requests in the form that OpenAI's clients read."""
        self._first_requests.came(request)
        try:
            self._check_client(request)
            return await self._counted(request, handler)
        except Refusal as error:
            refusal = error
        except UNREADABLE as error:
            refusal = unreadable(error)
        except web.HTTPException as error:
            allowed = "POST /v1/completions, POST /v1/chat/completions, GET /v1/models"
            message = f"{request.method} {request.path}: not served; allowed: {allowed}"
            refusal = Refusal(visible(message), code="unknown_url", status=error.status)
        except GleanerError as error:
            log.warning("a request is not answered: %s", error)
            refusal = Refusal("the run cannot answer now, as the server's log says; the same key may later", status=503)
        return web.json_response(chat_reply.refused(refusal), status=refusal.status)

    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        check_room(self._number_waiting)
        self._number_waiting += 1
        try:
            return await handler(request)
        finally:
            self._number_waiting -= 1

    def _check_client(self, request: web.Request) -> None:
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not answers_to(hosts[0], self._host):
            raise Refusal("the Host header names another machine", status=403)
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        keys = [given.strip()] if kind.lower() == "bearer" else keys_of(request.headers)
        secret = self._secret.encode()
        if not any(hmac.compare_digest(key.encode(errors="replace"), secret) for key in keys):
            raise Refusal("the API key is not this server's", code="invalid_api_key", status=401)

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(chat_reply.models())

    async def _completed(self, request: web.Request) -> web.StreamResponse:
        name, asked, answer = await self._asked(request, "text")
        return web.json_response(await asyncio.to_thread(text_answer, name, asked, answer, self._model))

    async def _chatted(self, request: web.Request) -> web.StreamResponse:
        name, asked, answer = await self._asked(request, "chat")
        assert asked.chat is not None
        if not asked.chat.stream:
            return web.json_response(await asyncio.to_thread(chat_answer, name, asked, answer, self._model))
        events = await asyncio.to_thread(chat_stream, name, asked, answer, self._model)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        with suppress(ConnectionError):  # a client need not read to the end
            await response.prepare(request)
            for event in events:
                await response.write(event)
            await response.write_eof()
        return response

    async def _asked(self, request: web.Request, kind: Kind) -> tuple[str, ServedRequest, Answer]:
        """The name of a request, the request, and its answer, when that has come."""
        key = request.headers.get("Idempotency-Key")
        if key is not None and not _KEY.fullmatch(key):
            raise Refusal("Idempotency-Key: allowed: 1 to 255 visible ASCII characters", param="Idempotency-Key")
        try:
            asked = await asyncio.to_thread(read_served, await self._body(request), kind, self._sampling)
            name = uuid.uuid4().hex if key is None else digest_of(key.encode())
            return name, asked, await self._found(name, asked, self._timeout_s, has_key=key is not None)
        except GleanerError:  # a store that is away is a TimeoutError, too
            raise
        except TimeoutError:
            message = f"no answer after {self._timeout_s:g} s (--timeout-s); the same Idempotency-Key waits on"
            raise Refusal(message, code="not_finished", status=504) from None

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await request.read()
        except TimeoutError:
            raise Refusal(f"the body did not come within {self._request_timeout_s:g} s", status=408) from None

    async def _found(self, name: str, asked: ServedRequest, within_s: float, *, has_key: bool = True) -> Answer:
        """The answer to a request, when that has come; raises TimeoutError after `within_s` seconds."""
        async with asyncio.timeout(within_s):
            while True:
                found = await asyncio.to_thread(self._book.begin, name, asked, has_key=has_key)
                if found is not None:
                    return await asyncio.shield(self._awaited(found))
                await asyncio.sleep(_LOOK_INTERVAL_S)

    def _awaited(self, found: Future[Answer]) -> asyncio.Future[Answer]:
        """The one future of the event loop for an answer: a thread's future keeps whatever has waited for it."""
        if found not in self._awaiting:
            self._awaiting[found] = made = asyncio.wrap_future(found)
            # Else an error for which nobody waits any more is logged with a traceback.
            made.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._awaiting[found]
