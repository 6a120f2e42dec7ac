"""Environments in which an agent asks: a program of the user's own that speaks OpenAI's language."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from resources.user_process import LOAD_TIME_LIMIT_S
from tasks.configuration.turns import TurnsConfig
from tasks.turns.agent_answering import AgentAnswer
from tasks.turns.agent_language import AgentLanguage
from tasks.turns.agent_programs import AgentPrograms
from tasks.turns.environments import Answer, OpenTurn
from tasks.turns.first_request import FirstRequest
from tasks.turns.living_environments import Reset
from tasks.turns.loop_environments import LoopEnvironments
from tasks.turns.tool_processes import Failed, NotBegun, ProcessLost, TimedOut
from tasks.turns.tool_schemas import ToolsUnusable

_BEGINS_MAX = 3


class AgentEnvironments(LoopEnvironments):
    """An Environments whose agents run in `turns.processes` child processes."""

    def __init__(
        self,
        config: TurnsConfig,
        language: AgentLanguage,
        stop_token_ids: Collection[int],
        resets: Callable[[OpenTurn], Reset],
    ) -> None:
        """Processes start at once. resets: what the plan has begun the agent of a turn's response with.

        Raises OSError if there is no free port.
        """
        self._config = config
        self._language = language
        self._stop_token_ids = frozenset(stop_token_ids)
        self._resets = resets
        super().__init__()

    def waits_for_journal(self, turn: OpenTurn) -> bool:  # noqa: ARG002 - of the protocol
        """See `Environments`: what an agent does is done again when it runs again, whether a turn is durable or not."""
        return False

    async def _open(self) -> None:
        self._programs = AgentPrograms(self._config, self._config.processes)
        await self._programs.open()

    async def _answered(self, turn: OpenTurn) -> Answer:
        reset = self._resets(turn)
        answer = AgentAnswer(turn, self._config, self._language, self._programs, self._stop_token_ids, reset)
        return await answer.answer()

    def _over(self, response: int) -> None:
        self._programs.forget(response, "another member has gone on with the response, or it is not needed any more")

    async def _end(self) -> None:
        await self._programs.close()


def first_requests(config: TurnsConfig, columns: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[str]:
    """What the agent asks first for each of these columns and seeds, as openings (first_request.py).

    It is refused an answer. Raises ToolsUnusable.
    """

    async def all_asked() -> list[str]:
        programs = AgentPrograms(config, min(config.processes, len(seeds)))
        await programs.open()
        try:
            asked = (_first_asked(programs, config, *each) for each in zip(columns, seeds, strict=True))
            return list(await asyncio.gather(*asked))
        finally:
            await programs.close()

    return asyncio.run(all_asked())


async def _first_asked(programs: AgentPrograms, config: TurnsConfig, columns: Mapping[str, Any], seed: int) -> str:
    why = ""
    for _ in range(_BEGINS_MAX):
        program = await programs.begun(columns, seed)
        try:
            request = await program.next_request(LOAD_TIME_LIMIT_S)
            if request is not None:
                programs.end(program, "the iteration is being planned: only the first request is wanted")
                return FirstRequest(request.messages, request.tools).text()
            program.reward()
            why = "it ended without one"
            break
        except Failed as failed:
            why = str(failed)
            break
        except TimedOut:
            why = f"it takes longer than {LOAD_TIME_LIMIT_S:g} s"
            break
        except ProcessLost as lost:
            why = f"its process {lost}"
        except NotBegun:
            why = "its process ended before"
    raise ToolsUnusable(f"turns.agent: {config.agent!r} sends no request: {why}")
