"""Environments in child processes, beside what a member does: `begin` only hands turns to a thread with an event loop.

The loop answers all open turns side by side (answering.py) and owns the processes, so it must live as long as they.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from tasks.configuration.turns import TurnsConfig
from tasks.turns.answering import Language, TurnAnswer, TurnCodec
from tasks.turns.environments import Answer, OpenTurn
from tasks.turns.living_environments import LivingEnvironments, Reset
from tasks.turns.tool_processes import Failed, NotBegun, ProcessLost, TimedOut, ToolProcesses
from tasks.turns.tool_schemas import ToolsUnusable

T = TypeVar("T")


class ProcessEnvironments:
    """An Environments whose tools and environments run in `turns.processes` child processes."""

    def __init__(
        self,
        config: TurnsConfig,
        codec: TurnCodec,
        stop_token_ids: Collection[int],
        resets: Callable[[OpenTurn], Reset],
        read_object: Callable[[int, str], bytes],
    ) -> None:
        """Processes start with the first turns.

        resets: what the plan has reset the environment of a turn's response with. read_object: the bytes of a state
        that a member has stored in an iteration by this digest.
        """
        self._config = config
        self._language = Language(codec, stop_token_ids)
        self._resets = resets
        self._read_object = read_object
        self._changed = threading.Condition()
        # By response, the number of the `begin` that opened its turn: what answers an earlier one is not wanted.
        self._open: dict[int, int] = {}
        self._begins = itertools.count()
        self._answers: list[Answer] = []
        self._problem: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem

    def waits_for_journal(self, turn: OpenTurn) -> bool:
        """See `Environments`."""
        side_effects = self._config.side_effects
        return bool(side_effects) and any(call.name in side_effects for call in self._language.calls(turn) or ())

    def begin(self, turns: Sequence[OpenTurn]) -> None:
        """See `Environments`."""
        with self._changed:
            for turn in turns:
                assert turn.response not in self._open
                self._open[turn.response] = begin = next(self._begins)
                self._loop.call_soon_threadsafe(self._begun, turn, begin)

    def answers(self, wait_s: float) -> list[Answer]:
        """See `Environments`. Raises ToolsUnusable if tools or the environment cannot be loaded in this process."""
        with self._changed:
            if self._open:
                self._changed.wait_for(lambda: self._answers or self._problem, wait_s)
            if self._problem is not None:
                raise self._problem
            answers, self._answers = self._answers, []
            for answer in answers:
                del self._open[answer.response]
        return answers

    def forget(self, responses: Sequence[int]) -> None:
        """See `Environments`."""
        with self._changed:
            for response in responses:
                self._open.pop(response, None)
            self._answers = [answer for answer in self._answers if answer.response in self._open]
        self._loop.call_soon_threadsafe(self._forgotten, list(responses))

    def close(self) -> None:
        """See `Environments`; may be repeated."""
        with self._changed:
            self._open.clear()
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
        processes = ToolProcesses(self._config, self._config.processes)
        self._living = LivingEnvironments(self._config, processes, self._resets, self._read_object)
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await processes.close()

    def _begun(self, turn: OpenTurn, begin: int) -> None:
        self._tasks[turn.response] = asyncio.create_task(self._answer(turn, begin))

    def _forgotten(self, responses: Sequence[int]) -> None:
        for response in responses:
            task = self._tasks.pop(response, None)
            if task is not None:
                task.cancel()
            self._living.forget(response)

    async def _answer(self, turn: OpenTurn, begin: int) -> None:
        problem = answer = None
        try:
            answer = await TurnAnswer(turn, self._config, self._language, self._living).answer()
        except Exception as error:  # noqa: BLE001 - it is raised where answers are asked for
            problem = error
        del self._tasks[turn.response]
        with self._changed:
            if self._open.get(turn.response) != begin:
                return  # it was forgotten
            self._problem = self._problem or problem
            if answer is not None:
                self._answers.append(answer)
            self._changed.notify()


def load_schemas(config: TurnsConfig) -> list[dict[str, Any]]:
    """The schemas of all tools, made in a child process; raises ToolsUnusable."""

    async def loaded(processes: ToolProcesses) -> list[dict[str, Any]]:
        return (await processes.chosen())[1].schemas

    return _with_processes(config, 1, loaded, describes=True)


def reset_texts(config: TurnsConfig, columns: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[str | None]:
    """What `reset` returns for each of these columns and seeds, on a new instance each; None without an environment.

    Raises ToolsUnusable.
    """
    if config.environment is None:
        return [None] * len(seeds)

    async def reset(processes: ToolProcesses, number: int) -> str | None:
        process, _ = await processes.chosen()
        request = {"do": "build", "number": number, "columns": dict(columns[number]), "seed": seeds[number]}
        try:
            text: str | None = (await process.ask(request, config.load_time_limit_s))["text"]
        except Failed as failed:
            why = str(failed)
        except (ProcessLost, NotBegun) as lost:
            why = f"its process {lost}" if str(lost) else "its process ended before"
        except TimedOut:
            why = f"it takes longer than turns.load_time_limit_s, {config.load_time_limit_s:g} s"
        else:
            process.forget(number)
            return text
        raise ToolsUnusable(f"turns.environment: {config.environment!r} cannot be reset: {why}")

    async def all_reset(processes: ToolProcesses) -> list[str | None]:
        return await asyncio.gather(*(reset(processes, number) for number in range(len(seeds))))

    return _with_processes(config, min(config.processes, len(seeds)), all_reset)


def _with_processes(
    config: TurnsConfig,
    count: int,
    work: Callable[[ToolProcesses], Coroutine[Any, Any, T]],
    *,
    describes: bool = False,
) -> T:
    async def worked() -> T:
        processes = ToolProcesses(config, count, describes=describes)
        try:
            return await work(processes)
        finally:
            await processes.close()

    return asyncio.run(worked())
