"""Tinker's door of `gleaner serve`: what the client of Tinker asks to sample, as requests of the run.

The client asks in two steps: `asample` is answered with the name of a future, and `retrieve_future` resolves the name.
A server that is started again knows every session and future of its earlier lives: a session is no more than its id,
the name of a future follows from the session and the client's counter, and the run holds what was asked before the
client gets the name.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from aiohttp import web

from resources.visible_text import visible
from storage.digests import DIGEST_PATTERN
from storage.errors import GleanerError
from tasks.configuration.sampling import SamplingConfig
from tasks.serving.answers import sampled
from tasks.serving.request_book import RequestBook
from tasks.serving.served_model import ServedModel
from tasks.serving.served_request import ServedRequest
from tasks.serving.tinker_request import SESSION, check_model, read_fields, read_sample
from tasks.serving.windows import Answer
from tasks.turns.chat_request import MODEL, Refusal

log = logging.getLogger(__name__)
PREFIX = "/api/v1/"
# The client takes no API key that begins otherwise.
KEY_PREFIX = "tml-"
# The client gives a look 45 s, and looks again at once.
LOOK_S = 30.0
_PROTOBUF = "application/x-protobuf"
# Fields of SampledSequence in tinker_public.proto, and of the SampleResponse around it: number << 3 | wire type.
_STOP_REASON, _TOKENS, _LOGPROBS, _SEQUENCE = 1 << 3, 2 << 3 | 2, 3 << 3 | 2, 1 << 3 | 2
_LENGTH = 1
# The key itself is sent, each future is asked for alone, and copies of a client choose their own numbers.
_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
}
# A request that is given up goes on in its window.
_DYNAMIC_CONFIG = {"sample_cancel_enabled": False}
Read = Callable[[web.Request], Awaitable[bytes]]
Find = Callable[[str, ServedRequest, float], Awaitable[Answer]]


def keys_of(headers: Mapping[str, str]) -> tuple[str, str]:
    """The keys that a client of Tinker may mean by the one that it sends."""
    given = headers.get("X-API-Key", "").strip()
    return given, given.removeprefix(KEY_PREFIX)


class TinkerDoor:
    """The handlers of one server."""

    def __init__(
        self, book: RequestBook, model: ServedModel, sampling: SamplingConfig, *, read: Read, find: Find
    ) -> None:
        """read: the body of a request. find: the answer to a named one; raises TimeoutError after that many seconds."""
        self._book, self._model, self._sampling = book, model, sampling
        self._read, self._find = read, find

    def routes(self) -> Sequence[web.RouteDef]:
        """What the server answers below PREFIX; the rest is refused by name."""
        handlers = {
            "client/config": self._configured,
            "client/dynamic_config": self._configured,
            "create_session": self._session_created,
            "create_sampling_session": self._sampling_session_created,
            "session_heartbeat": self._acknowledged,
            "sessions/{session_id}/finish": self._acknowledged,
            "telemetry": self._acknowledged,
            "asample": self._sampling_begun,
            "retrieve_future": self._retrieved,
        }
        routes = [web.post(PREFIX + path, handler) for path, handler in handlers.items()]
        known = web.get(PREFIX + "get_server_capabilities", self._capabilities)
        return [*routes, known, web.route("*", PREFIX + "{path:.*}", self._refused)]

    async def _configured(self, request: web.Request) -> web.StreamResponse:
        await self._read(request)
        return web.json_response(_DYNAMIC_CONFIG if request.path.endswith("dynamic_config") else _CLIENT_CONFIG)

    async def _capabilities(self, _: web.Request) -> web.StreamResponse:
        model = {"model_name": MODEL, "trainable": False, "sampleable": True}
        return web.json_response({"supported_models": [model]})

    async def _acknowledged(self, request: web.Request) -> web.StreamResponse:
        """What a client tells of itself is not kept."""
        await self._read(request)
        return web.json_response({"status": "accepted"})

    async def _session_created(self, request: web.Request) -> web.StreamResponse:
        await self._read(request)
        return web.json_response({"session_id": uuid.uuid4().hex})

    async def _sampling_session_created(self, request: web.Request) -> web.StreamResponse:
        fields = read_fields(await self._read(request))
        check_model(fields)
        session, number = fields.get("session_id"), fields.get("sampling_session_seq_id")
        if not isinstance(session, str) or not SESSION.fullmatch(session):
            raise Refusal("session_id: allowed: what create_session has answered", param="session_id")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 10**9:
            raise Refusal("sampling_session_seq_id: allowed: 0 to 999999999", param="sampling_session_seq_id")
        return web.json_response({"sampling_session_id": f"{session}:sample:{number}"})

    async def _sampling_begun(self, request: web.Request) -> web.StreamResponse:
        """Name the future of a request that is recorded, and let its window begin."""
        body = await self._read(request)
        name, asked = await asyncio.to_thread(read_sample, body, self._sampling, self._model.stop_tokens)
        try:
            await asyncio.to_thread(self._book.begin, name, asked, has_key=True, is_kept=True)
        except Refusal as error:
            if error.code != "idempotency_key_reused":
                raise
            message = "seq_id: the session has used the number for another request; allowed: a new number"
            raise Refusal(message, param="seq_id", status=422) from None
        ids = [f"{name}:{sample}" for sample in range(asked.n)]
        return web.json_response({"request_id": name, "sample_sequence_ids": ids})

    async def _retrieved(self, request: web.Request) -> web.StreamResponse:
        """The answer to a request, or, after a time, that the client shall look again."""
        name = read_fields(await self._read(request)).get("request_id")
        if not isinstance(name, str) or not DIGEST_PATTERN.fullmatch(name):
            raise _unknown(name)
        try:
            asked = await asyncio.to_thread(self._book.kept, name)
            if asked is None:
                raise _unknown(name)
            answer = await self._find(name, asked, LOOK_S)
        except GleanerError as error:  # first, because a store that is away is a TimeoutError, too
            log.warning("a future is not resolved: %s", error)
            # Of all that a client repeats, it takes its time with this one alone.
            raise Refusal("the run cannot answer now, as the server's log says", status=429) from None
        except TimeoutError:
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(again, status=408)
        return web.Response(body=await asyncio.to_thread(encoded, asked, answer), content_type=_PROTOBUF)

    async def _refused(self, request: web.Request) -> web.StreamResponse:
        message = f"{request.path.removeprefix(PREFIX)}: not served; this server samples from a run, and trains nothing"
        raise Refusal(visible(message), code="unknown_url", status=404)


def encoded(asked: ServedRequest, answer: Answer) -> bytes:
    """An answer as the SampleResponse of tinker_public.proto, the only form in which the client takes it."""
    return b"".join(_field(_SEQUENCE, _sequence(*each)) for each in sampled(asked, answer))


def _sequence(ids: Sequence[int], logprobs: npt.NDArray[np.float32], reason: str) -> bytes:
    # 0, which stands for "stop", is not written.
    ending = bytes([_STOP_REASON, _LENGTH]) if reason == "length" else b""
    tokens, scores = np.asarray(ids, "<i4").tobytes(), logprobs.astype("<f4").tobytes()
    return ending + _field(_TOKENS, tokens) + _field(_LOGPROBS, scores)


def _field(tag: int, data: bytes) -> bytes:
    """A field of bytes: tag, length, content."""
    length, left = bytearray(), len(data)
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([tag, *length, left]) + data


def _unknown(name: object) -> Refusal:
    shown = visible(str(name))[:80]
    message = f"request_id: value {shown!r}; allowed: what asample of this run has answered"
    return Refusal(message, param="request_id", status=404)
