"""The child processes in which tools and environments run, seen from the event loop of the member.

A process answers many requests side by side (environment_worker.py). A request cannot be stopped, so a process whose
request takes too long is *retired*: a retired process begins nothing new, and is killed when its last wanted request
has ended and its last wanted environment is gone. A process that then does not even answer a ping is *stuck*: the
process is killed, and the culprit shows when each of its requests is made again in a process of its own.
"""

import asyncio
import contextlib
import secrets
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

from resources import user_process
from resources.user_process import LOAD_TIME_LIMIT_S
from resources.wire import HEADER_BYTES, PeerGone, body_bytes, pack, parse
from tasks.configuration.turns import TurnsConfig
from tasks.turns.tool_schemas import ToolsUnusable

# Calls, or agents, that one process performs side by side; threads that wait cost little.
CALLS_PER_PROCESS = 32
_MODULE = "tasks.turns.environment_worker"
_STARTS_MAX = 3
_EXIT_TIME_LIMIT_S = 1.0
# For what the `close` methods of a user's environments do.
_CLOSE_TIME_LIMIT_S = 1.0
_BUFFER_BYTES = 1 << 20
_PING_LIMIT_S = 2.0


class ProcessLost(Exception):  # noqa: N818 - reads as what happened
    """The process ended during the request; the message says how."""


class Stuck(ProcessLost):
    """The process answers nothing any more, because of the failed request or of another request."""


class TimedOut(Exception):  # noqa: N818 - as above
    """The request took longer than its limit; its process is retired."""


class NotBegun(Exception):  # noqa: N818 - as above
    """The request was not begun: its process is retired, or ended before."""


class Failed(Exception):  # noqa: N818 - as above
    """A user's code raised, or returned what is not allowed; the message says what."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the loaded tools and the environment's class offer.

    Attributes:
        schemas: the schemas of all tools, if the process describes tools.
        functions: the names of the tools that are functions.
        methods: the names of the tools that are methods of the environment.
        has_reward: whether the environment has get_reward.
        has_state: whether the environment has get_state and set_state.
        restores: whether the environment has restore.
    """

    schemas: list[dict[str, Any]]
    functions: frozenset[str]
    methods: frozenset[str]
    has_reward: bool
    has_state: bool
    restores: bool


class ToolProcess:
    """One child process. `environments` holds the numbers of the wanted environments in the process."""

    def __init__(self, config: TurnsConfig, *, describes: bool = False, is_alone: bool = False) -> None:
        """is_alone: whether the process serves one response, and ends with the response's requests or environment."""
        self._config = config
        self._is_alone = is_alone
        self._pinged: asyncio.Task[None] | None = None
        self._describes = describes
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._begun: set[str] = set()
        self._slots = asyncio.Semaphore(CALLS_PER_PROCESS)
        self._queued = 0
        self._exited = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.ReadTransport | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._forgetting: set[asyncio.Task[Any]] = set()
        self._keeps = config.environment is not None
        self.environments: set[int] = set()
        self.lost = False
        self.retired = False
        self.loaded: asyncio.Task[Offer] = asyncio.create_task(self._load())
        # Which caller is told of a failure is not known.
        self.loaded.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def load(self) -> int:
        """How much it has to do: environments, and requests that run or wait."""
        return len(self.environments) + self._queued

    async def ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Make a request once fewer than CALLS_PER_PROCESS run; its reply.

        Raises ProcessLost, TimedOut, NotBegun and Failed. The request goes on if the caller is cancelled.
        """
        return await asyncio.shield(self._task(self._asked(message, limit_s)))

    async def run(self, message: dict[str, Any], begun: asyncio.Event) -> dict[str, Any]:
        """Make a request without a limit; its reply. `begun` is set when fewer than CALLS_PER_PROCESS ran.

        Raises ProcessLost, NotBegun and Failed. The request is not waited for any more if the caller is cancelled.
        """
        return await self._asked(message, None, begun)

    def forget(self, number: int) -> None:
        """An environment is not wanted any more."""
        self.environments.discard(number)
        if not self.lost:
            task = self._task(self._forgotten(number))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    def kill(self, how: str = "was ended", kind: type[ProcessLost] = ProcessLost) -> None:
        """End the process and its children. Waiting requests get an error of the given kind, or NotBegun."""
        if self.lost:
            return
        self.lost = True
        if self._process is not None:
            user_process.end(self._process)
        for number, future in self._waiting.items():
            if not future.done():
                begun = number in self._begun or not self.loaded.done()
                future.set_exception(kind(how) if begun else NotBegun())
        if self._reader is not None and not self._reader.is_closing():
            self._reader.close()
        if self._writer is not None and not self._writer.is_closing():
            self._writer.abort()

    async def close(self) -> None:
        """Close the remaining environments, kill the process, and end the tasks that watch the process."""
        for number in list(self.environments):
            self.forget(number)
        if self._forgetting and not self.lost:
            await asyncio.wait(self._forgetting, timeout=_CLOSE_TIME_LIMIT_S)
        self.kill()
        for task in (*self._tasks, self.loaded):
            task.cancel()
        await asyncio.gather(*self._tasks, self.loaded, return_exceptions=True)

    def _task(self, coroutine: Any) -> "asyncio.Task[Any]":
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self) -> Offer:
        if self.lost:
            raise NotBegun
        try:
            return await self._started()
        except (Failed, TimedOut, ProcessLost, NotBegun):
            self.kill()
            raise

    async def _started(self) -> Offer:
        loop = asyncio.get_running_loop()
        self._process = process = user_process.start(_MODULE, self._config.environment_variables)
        threading.Thread(target=self._await_end, args=(process, loop), daemon=True).start()
        reader = asyncio.StreamReader(_BUFFER_BYTES)
        pipe = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        self._reader = pipe[0]
        self._writer = (await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin))[0]
        self._task(self._read(reader))
        reply = await self._exchange(
            {
                "tools": list(self._config.tools),
                "environment": self._config.environment,
                "agent": self._config.agent,
                "describes": self._describes,
            },
            LOAD_TIME_LIMIT_S,
        )
        offer = Offer(
            reply["schemas"],
            frozenset(reply["functions"]),
            frozenset(reply["methods"]),
            reply["has_reward"],
            reply["has_state"],
            reply["restores"],
        )
        # One that can be built again elsewhere need not be kept.
        self._keeps = bool(self._config.environment) and not (offer.has_state or offer.restores or self._config.replay)
        return offer

    def _await_end(self, process: "subprocess.Popen[bytes]", loop: asyncio.AbstractEventLoop) -> None:
        # The end of the pipe does not tell of the end of the process: what a tool has forked may hold the pipe.
        user_process.await_end(process)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._exited.set)
            loop.call_soon_threadsafe(loop.call_later, _EXIT_TIME_LIMIT_S, self._ended)

    def _ended(self) -> None:
        process = self._process
        if process is None or not self._exited.is_set():
            self.kill("ended")
        else:
            user_process.end(process)
            self.kill(f"ended with status {process.returncode}")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = body_bytes(await reader.readexactly(HEADER_BYTES))
                message = parse(await reader.readexactly(size))
                if "begun" in message:
                    self._begun.add(message["request"])
                    continue
                future = self._waiting.get(message["request"])
                if future is not None and not future.done():
                    future.set_result(message)
        except (asyncio.IncompleteReadError, OSError):
            # The pipe closes a moment before the process has an exit status.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _EXIT_TIME_LIMIT_S)
            self._ended()
        except (PeerGone, ValueError, KeyError, TypeError):
            self.kill("wrote what is no reply")

    async def _asked(
        self, message: dict[str, Any], limit_s: float | None, begun: asyncio.Event | None = None
    ) -> dict[str, Any]:
        self._queued += 1
        try:
            async with self._slots:
                if self.retired and not (self._keeps and message.get("number") in self.environments):
                    raise NotBegun
                if begun is not None:
                    begun.set()
                return await self._exchange(message, limit_s)
        finally:
            self._queued -= 1
            self._end_if_unwanted()

    async def _exchange(self, message: dict[str, Any], limit_s: float | None) -> dict[str, Any]:
        if self.lost or self._writer is None:
            raise NotBegun
        # A secret, so that no other call can answer this one.
        number = secrets.token_hex(16)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._writer.write(pack({**message, "request": number}))
            await asyncio.wait({future}, timeout=limit_s)
            if not future.done():
                await self._ping(future)
            if not future.done():
                self.retired = True
                raise TimedOut
            reply: dict[str, Any] = future.result()
        finally:
            if not future.cancel():
                future.exception()  # known, though no caller waits for it any more
            del self._waiting[number]
            self._begun.discard(number)
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    async def _ping(self, late: "asyncio.Future[Any]") -> None:
        """Kill a stuck process, so that no request is blamed for the fault of a different request.

        late: a request whose time is over; it may still be answered meanwhile.
        """
        if self._is_alone or not self.loaded.done():
            return
        if self._pinged is None or self._pinged.done():
            self._pinged = self._task(self._ping_once())
        began_s = time.monotonic()
        await asyncio.wait({self._pinged})
        # What another request has held up is answered as soon as that lets go.
        await asyncio.wait({late}, timeout=time.monotonic() - began_s)

    async def _ping_once(self) -> None:
        number = secrets.token_hex(16)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if self._writer is not None:
                self._writer.write(pack({"do": "ping", "request": number}))
            await asyncio.wait({answered}, timeout=_PING_LIMIT_S)
            if not answered.done():
                self._begun.update(self._waiting)
                self.kill("answers nothing any more", Stuck)
            answered.exception()
        finally:
            del self._waiting[number]

    async def _forgotten(self, number: int) -> None:
        with contextlib.suppress(ProcessLost, TimedOut, NotBegun, Failed):
            await self._exchange({"do": "forget", "number": number}, self._config.call_time_limit_s)
        self._end_if_unwanted()

    def _end_if_unwanted(self) -> None:
        if self._waiting or self._queued:
            return
        if (self._is_alone and not self.environments) or (self.retired and not (self._keeps and self.environments)):
            self.kill("was ended, because a call in it took too long")


class ToolProcesses:
    """A number of processes for new work, and retired processes until their end."""

    def __init__(self, config: TurnsConfig, count: int, *, describes: bool = False) -> None:
        """count: the number of processes for new work. describes: whether processes make the schemas of the tools."""
        self._config = config
        self._count = count
        self._describes = describes
        self._processes: list[ToolProcess] = []
        self._alone: list[ToolProcess] = []

    def start(self) -> None:
        """Start missing processes without waiting for them."""
        self._working()

    async def chosen(self) -> tuple[ToolProcess, Offer]:
        """The loaded process that has the least to do. Raises ToolsUnusable."""
        problem: BaseException | None = None
        for _ in range(_STARTS_MAX):
            working = self._working()
            ready = [each for each in working if each.loaded.done()]
            if not ready:
                done, _ = await asyncio.wait([each.loaded for each in working], return_when=asyncio.FIRST_COMPLETED)
                ready = [each for each in working if each.loaded in done and not each.lost]
                problem = next(iter(done)).exception()
            if ready:
                least = min(ready, key=lambda each: each.load)
                return least, least.loaded.result()
            if not isinstance(problem, ProcessLost | NotBegun):
                break
        named = ", ".join(self._config.functions)
        if isinstance(problem, Failed):
            raise ToolsUnusable(str(problem))
        if isinstance(problem, TimedOut):
            raise ToolsUnusable(f"turns: loading {named} takes longer than {LOAD_TIME_LIMIT_S:g} s")
        raise ToolsUnusable(f"turns: {named}: the process that loads them {str(problem) or 'ended'}")

    async def alone(self) -> ToolProcess:
        """A loaded process of its own, for the requests of one response. Raises ProcessLost."""
        self._alone = [each for each in self._alone if not each.lost]
        process = ToolProcess(self._config, is_alone=True)
        self._alone.append(process)
        try:
            await process.loaded
        except (Failed, TimedOut, NotBegun) as error:
            raise ProcessLost(f"cannot be started again: {error or type(error).__name__}") from None
        except asyncio.CancelledError:
            # The response is not wanted any more, so no request ends the process.
            process.kill()
            raise
        return process

    async def close(self) -> None:
        """Close all environments and kill all processes."""
        await asyncio.gather(*(process.close() for process in (*self._processes, *self._alone)))

    def _working(self) -> list[ToolProcess]:
        """As many as there should be."""
        self._processes = [each for each in self._processes if not each.lost]
        working = [each for each in self._processes if not each.retired]
        started = [ToolProcess(self._config, describes=self._describes) for _ in range(self._count - len(working))]
        self._processes += started
        return working + started
