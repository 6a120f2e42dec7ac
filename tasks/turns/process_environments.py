"""Environments whose tools run in child processes, and what `plan` asks of such processes."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from resources.user_process import LOAD_TIME_LIMIT_S
from tasks.configuration.turns import TurnsConfig
from tasks.turns.answering import CodecOf, Language, TurnAnswer
from tasks.turns.environments import Answer, OpenTurn
from tasks.turns.living_environments import LivingEnvironments, Reset
from tasks.turns.loop_environments import LoopEnvironments
from tasks.turns.tool_processes import Failed, NotBegun, ProcessLost, TimedOut, ToolProcesses
from tasks.turns.tool_schemas import ToolsUnusable

T = TypeVar("T")


class ProcessEnvironments(LoopEnvironments):
    """An Environments whose tools and environments run in `turns.processes` child processes."""

    def __init__(
        self,
        config: TurnsConfig,
        codec_of: CodecOf,
        stop_token_ids: Collection[int],
        resets: Callable[[OpenTurn], Reset],
        read_object: Callable[[int, str], bytes],
    ) -> None:
        """Start the processes at once, so that the first turns find loaded tools.

        Args:
            config: the run's settings for turns.
            codec_of: makes the codec for the tools of a plan; called when the tools differ from the last turn's.
            stop_token_ids: the tokens with which a turn of the policy ends.
            resets: the arguments and the result of the reset with which the plan began a response's environment.
            read_object: the bytes of a stored state, by iteration and digest.
        """
        self._config = config
        self._language = Language(codec_of, stop_token_ids)
        self._resets = resets
        self._read_object = read_object
        super().__init__()

    def waits_for_journal(self, turn: OpenTurn) -> bool:
        """See `Environments`."""
        side_effects = self._config.side_effects
        return bool(side_effects) and any(call.name in side_effects for call in self._language.calls(turn) or ())

    async def _open(self) -> None:
        self._processes = ToolProcesses(self._config, self._config.processes)
        self._processes.start()
        self._living = LivingEnvironments(self._config, self._processes, self._resets, self._read_object)

    async def _answered(self, turn: OpenTurn) -> Answer:
        return await TurnAnswer(turn, self._config, self._language, self._living).answer()

    def _over(self, response: int) -> None:
        self._living.forget(response)

    async def _end(self) -> None:
        await self._processes.close()


def load_schemas(config: TurnsConfig) -> list[dict[str, Any]]:
    """The schemas of all tools, made in a child process; raises ToolsUnusable."""

    async def loaded(processes: ToolProcesses) -> list[dict[str, Any]]:
        return (await processes.chosen())[1].schemas

    return with_processes(config, 1, loaded, describes=True)


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
            text: str | None = (await process.ask(request, LOAD_TIME_LIMIT_S))["text"]
        except Failed as failed:
            why = str(failed)
        except (ProcessLost, NotBegun) as lost:
            why = f"its process {lost}" if str(lost) else "its process ended before"
        except TimedOut:
            why = f"it takes longer than {LOAD_TIME_LIMIT_S:g} s"
        else:
            process.forget(number)
            return text
        raise ToolsUnusable(f"turns.environment: {config.environment!r} cannot be reset: {why}")

    async def all_reset(processes: ToolProcesses) -> list[str | None]:
        return await asyncio.gather(*(reset(processes, number) for number in range(len(seeds))))

    return with_processes(config, min(config.processes, len(seeds)), all_reset)


def with_processes(
    config: TurnsConfig,
    count: int,
    work: Callable[[ToolProcesses], Coroutine[Any, Any, T]],
    *,
    describes: bool = False,
) -> T:
    """Run `work` with `count` processes of tools, end the processes, and return the result of `work`."""

    async def worked() -> T:
        processes = ToolProcesses(config, count, describes=describes)
        try:
            return await work(processes)
        finally:
            await processes.close()

    return asyncio.run(worked())
