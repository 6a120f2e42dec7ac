"""Environments beside the lanes of a member: `begin` only hands turns to a thread with an event loop.

The loop answers all open turns side by side, owns the processes of tools, and must live as long as any process.
"""

import asyncio
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tasks.turns.environments import Answer, OpenTurn


class LoopEnvironments(ABC):
    """An Environments whose turns are answered by coroutines; a class of it says how."""

    def __init__(self) -> None:
        """Open them; raises what `_open` raises."""
        self._changed = threading.Condition()
        # By response, the number of the `begin` that opened its turn: what answers an earlier one is not wanted.
        self._wanted: dict[int, int] = {}
        self._begins = itertools.count()
        self._answers: list[Answer] = []
        self._problem: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem

    @abstractmethod
    def waits_for_journal(self, turn: OpenTurn) -> bool:
        """See `Environments`."""

    @abstractmethod
    async def _open(self) -> None:
        """Called once on the loop, before any turn."""

    @abstractmethod
    async def _answered(self, turn: OpenTurn) -> Answer:
        """The answer to a turn; errors appear in the thread that asks for answers."""

    @abstractmethod
    def _over(self, response: int) -> None:
        """The response is over, or is not this member's any more. Called on the loop."""

    @abstractmethod
    async def _end(self) -> None:
        """Called once on the loop, when no turn is being answered any more."""

    def begin(self, turns: Sequence[OpenTurn]) -> None:
        """See `Environments`."""
        with self._changed:
            for turn in turns:
                assert turn.response not in self._wanted
                self._wanted[turn.response] = begin = next(self._begins)
                self._loop.call_soon_threadsafe(self._begun, turn, begin)

    def answers(self, wait_s: float) -> list[Answer]:
        """See `Environments`. Raises ToolsUnusable if the user's code cannot be loaded in this process."""
        with self._changed:
            if self._wanted:
                self._changed.wait_for(lambda: self._answers or self._problem, wait_s)
            if self._problem is not None:
                raise self._problem
            answers, self._answers = self._answers, []
            for answer in answers:
                del self._wanted[answer.response]
        return answers

    def forget(self, responses: Sequence[int]) -> None:
        """See `Environments`."""
        with self._changed:
            for response in responses:
                self._wanted.pop(response, None)
            self._answers = [answer for answer in self._answers if answer.response in self._wanted]
        self._loop.call_soon_threadsafe(self._forgotten, list(responses))

    def close(self) -> None:
        """See `Environments`; may be repeated."""
        with self._changed:
            self._wanted.clear()
            self._answers.clear()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - it is raised where answers are asked for
            with self._changed:
                self._problem = self._problem or error
                self._changed.notify()
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        await self._open()
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()

    def _begun(self, turn: OpenTurn, begin: int) -> None:
        self._tasks[turn.response] = asyncio.create_task(self._answer(turn, begin))

    def _forgotten(self, responses: Sequence[int]) -> None:
        for response in responses:
            task = self._tasks.pop(response, None)
            if task is not None:
                task.cancel()
            self._over(response)

    async def _answer(self, turn: OpenTurn, begin: int) -> None:
        problem = answer = None
        try:
            answer = await self._answered(turn)
        except Exception as error:  # noqa: BLE001 - it is raised where answers are asked for
            problem = error
        del self._tasks[turn.response]
        with self._changed:
            if self._wanted.get(turn.response) != begin:
                return  # it was forgotten
            self._problem = self._problem or problem
            if answer is not None:
                self._answers.append(answer)
            self._changed.notify()
