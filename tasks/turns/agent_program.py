"""One life of an agent: a program of the user's that asks, is answered, and ends.

The server hands in the program's requests, and the answers to turns take the requests one by one. Both run on one event
loop.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.turns.chat_reply import Completion
from tasks.turns.chat_request import ChatRequest, Refusal
from tasks.turns.own_template import Message
from tasks.turns.tool_processes import TimedOut, ToolProcess
from tasks.turns.tool_schemas import Schema


@dataclass(slots=True)
class _WaitingRequest:
    """A waiting request of the program.

    Attributes:
        request: the request.
        reply: the reply to the request, or a Refusal.
        is_gone: whether the connection of the request is closed.
    """

    request: ChatRequest
    reply: asyncio.Future[Completion]
    is_gone: Callable[[], bool]


class AgentProgram:
    """A program that runs.

    messages, tools: the conversation up to the last accepted request or the last served turn. was_refused: whether a
    request came after the last answer.
    """

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self.messages: tuple[Message, ...] = ()
        self.tools: tuple[Schema, ...] = ()
        self.was_refused = False
        self._process: ToolProcess | None = None
        self._run: asyncio.Task[dict[str, Any]] | None = None
        self._begun = asyncio.Event()
        self._changed = asyncio.Event()
        self._waiting: _WaitingRequest | None = None
        # The last answer, if the connection for it was closed by then.
        self._unread: tuple[ChatRequest, Completion] | None = None
        self._no_more: Refusal | None = None
        self._on_end: list[Callable[[], Any]] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for an answer."""
        return self._waiting is not None

    @property
    def has_ended(self) -> bool:
        return self._run is not None and self._run.done()

    def start(self, process: ToolProcess, message: dict[str, Any]) -> None:
        """Run in a process, with the given fields of the request `agent`."""
        self._process = process
        self._run = asyncio.create_task(process.run({"do": "agent", "number": None, **message}, self._begun))
        self._run.add_done_callback(self._ended)

    def on_end(self, call: Callable[[], Any]) -> None:
        """Call `call` when the program has ended."""
        self._on_end.append(call)

    async def ask(self, request: ChatRequest, is_gone: Callable[[], bool]) -> Completion:
        """The answer to a request of the program; raises Refusal. is_gone: whether its connection is closed."""
        if self._no_more is not None:
            self.was_refused = True
            raise self._no_more
        waiting = self._waiting
        if waiting is None and self._unread is not None and self._unread[0] == request:
            return self._unread[1]
        if waiting is None:
            waiting = self._waiting = _WaitingRequest(request, asyncio.get_running_loop().create_future(), is_gone)
            self._changed.set()
        elif waiting.is_gone() and waiting.request == request:
            # A client that has waited for too long asks again.
            waiting.is_gone = is_gone
        else:
            raise Refusal(
                "a request came while another one was not answered; allowed: one at a time", code="parallel_requests"
            )
        return await asyncio.shield(waiting.reply)

    async def next_request(self, limit_s: float) -> ChatRequest | None:
        """The request that the program waits with; None if it has ended.

        The time counts from the program's start. Raises TimedOut, after which the program's process begins nothing new.
        """
        assert self._run is not None
        assert self._process is not None
        begun = asyncio.ensure_future(self._begun.wait())
        try:
            await asyncio.wait({begun, self._run}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun.cancel()
        try:
            async with asyncio.timeout(limit_s):
                while self._waiting is None and not self._run.done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._process.retired = True
            raise TimedOut from None
        return None if self._run.done() or self._waiting is None else self._waiting.request

    def accept(self, request: ChatRequest) -> None:
        """The conversation goes on with the request that waits."""
        self.messages, self.tools = request.messages, request.tools

    def deliver(self, completion: Completion, message: Message) -> None:
        """Answer the request that waits; `message` is what the conversation goes on with."""
        assert self._waiting is not None
        if not self._waiting.reply.done():
            self._waiting.reply.set_result(completion)
        self._unread = (self._waiting.request, completion) if self._waiting.is_gone() else None
        self._waiting = None
        self.messages = (*self.messages, message)

    def refuse(self, refusal: Refusal) -> None:
        """Refuse the waiting request, if there is one, and every later request."""
        self._no_more = refusal
        self.was_refused = self.was_refused or self._waiting is not None
        self._turn_away(refusal)

    def _turn_away(self, refusal: Refusal) -> None:
        if self._waiting is not None and not self._waiting.reply.done():
            self._waiting.reply.set_exception(refusal)
            # The connection may be closed, and the error never fetched.
            self._waiting.reply.exception()
        self._waiting = None

    def reward(self) -> float | None:
        """What the program has returned; raises ProcessLost, NotBegun, and Failed if it raised."""
        assert self._run is not None
        value: float | None = self._run.result()["reward"]
        return value

    async def wind_up(self, limit_s: float) -> None:
        """Wait for the end of an unwanted program; after `limit_s` seconds its process begins nothing new."""
        if self._run is None or self._process is None:
            return
        if not self._begun.is_set():
            self._run.cancel()
        done, _ = await asyncio.wait({self._run}, timeout=limit_s)
        if not done:
            self._process.retired = True
            self._run.cancel()

    def _ended(self, run: "asyncio.Task[dict[str, Any]]") -> None:
        # Which caller is told of a failure is not known.
        run.cancelled() or run.exception()
        over = Refusal("the agent has ended", code="response_over")
        self._no_more = self._no_more or over
        self._turn_away(over)
        for call in self._on_end:
            call()
        self._changed.set()
