"""The agents of a member's responses: one agent a response, in a child process, from the first turn to the end."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.configuration.turns import TurnsConfig
from tasks.turns.agent_program import AgentProgram
from tasks.turns.agent_server import AgentServer
from tasks.turns.chat_request import Refusal
from tasks.turns.environments import OpenTurn
from tasks.turns.living_environments import Reset
from tasks.turns.tool_processes import ToolProcesses


@dataclass(slots=True)
class _Place:
    """The program of a response, and its progress.

    Attributes:
        program: the program of the agent.
        iteration: the iteration of the response.
        turns: the number of turns that the program has got.
        restarts: the number of times that the response had begun again.
    """

    program: AgentProgram
    iteration: int
    turns: int
    restarts: int


class AgentPrograms:
    """Programs by response. One event loop uses it."""

    def __init__(self, config: TurnsConfig, count: int) -> None:
        """count: of the processes."""
        self._config = config
        self._processes = ToolProcesses(config, count)
        self._server = AgentServer()
        self._places: dict[int, _Place] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen for requests, and start the processes. Raises OSError if no port is free."""
        await self._server.start()
        self._processes.start()

    async def close(self) -> None:
        """Kill all processes, and stop listening."""
        for task in self._ending:
            task.cancel()
        await self._processes.close()
        await self._server.close()

    async def begun(self, columns: Mapping[str, Any], seed: int) -> AgentProgram:
        """A program that begins. Raises ToolsUnusable."""
        process, _ = await self._processes.chosen()
        program = AgentProgram()
        base_url = self._server.admit(program)
        given = {"columns": dict(columns), "seed": seed, "base_url": base_url, "api_key": program.key}
        program.start(process, given)
        return program

    async def started(self, turn: OpenTurn, reset: Reset) -> AgentProgram:
        """The program of a turn's response, from its beginning. Raises ToolsUnusable."""
        self.forget(turn.response, "the agent is started again")
        program = await self.begun(reset.columns, reset.seed)
        self._places[turn.response] = _Place(program, turn.iteration, len(turn.events), turn.restarts)
        return program

    def kept(self, turn: OpenTurn) -> AgentProgram | None:
        """The program that waits for just this turn; None if there is none."""
        place = self._places.get(turn.response)
        if place is None:
            return None
        is_at = (place.iteration, place.turns, place.restarts) == (turn.iteration, len(turn.events), turn.restarts)
        return place.program if is_at and place.program.is_waiting else None

    def keep(self, turn: OpenTurn) -> None:
        """The turn is answered, and the program waits for the next one."""
        self._places[turn.response].turns = len(turn.events) + 1

    def forget(self, response: int, why: str) -> None:
        """No request of the response's program is answered any more."""
        place = self._places.pop(response, None)
        if place is not None:
            self.end(place.program, why)

    def end(self, program: AgentProgram, why: str) -> None:
        """Let a program come to its end; it is not waited for."""
        program.refuse(Refusal(why, code="response_over"))
        task = asyncio.create_task(program.wind_up(self._config.call_time_limit_s))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
