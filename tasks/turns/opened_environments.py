"""The environments of a member, and what `plan` asks of them: child processes of tools, or of agents.

An agent is a program of the user's own that speaks OpenAI's language.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from resources.user_process import LOAD_TIME_LIMIT_S
from storage.journal.noise_keys import group_seed
from storage.records import layout
from storage.records.records import PlanRecord
from storage.stores.store import ObjectStore
from tasks.configuration.turns import TurnsConfig
from tasks.prompts.auto_tokenizer import read_tokenizer
from tasks.prompts.openings import reset_columns
from tasks.turns.agent_answering import AgentAnswer
from tasks.turns.agent_language import AgentLanguage
from tasks.turns.agent_programs import AgentPrograms
from tasks.turns.answering import CodecOf, Language, TurnAnswer
from tasks.turns.conversation import Conversation
from tasks.turns.environments import Answer, Environments, OpenTurn
from tasks.turns.first_request import FirstRequest
from tasks.turns.living_environments import LivingEnvironments, Reset
from tasks.turns.loop_environments import LoopEnvironments
from tasks.turns.tool_processes import Failed, NotBegun, ProcessLost, TimedOut, ToolProcesses
from tasks.turns.tool_schemas import ToolsUnusable

T = TypeVar("T")
_BEGINS_MAX = 3


@contextmanager
def opened_environments(
    turns: TurnsConfig | None, store: ObjectStore, plan: PlanRecord, model_dir: Path
) -> Iterator[Environments | None]:
    """The environments for every plan of the run, closed at the end of the block; None without turns.

    Raises the errors of transformers for a tokenizer that it does not understand.
    """
    if turns is None:
        yield None
        return
    stops = plan.sampling.stop_token_ids
    tokenizer = read_tokenizer(model_dir)
    environments: AgentEnvironments | ProcessEnvironments
    if turns.agent is not None:
        language = AgentLanguage(tokenizer, stops, skip_special_tokens=plan.sampling.skip_special_tokens)
        environments = AgentEnvironments(turns, language, stops, _reset)
    else:
        environments = ProcessEnvironments(
            turns,
            lambda tools: Conversation(tokenizer, tools, stops),
            stops,
            resets=_reset,
            read_object=lambda iteration, digest: store.get(layout.environment_state(iteration, digest)),
        )
    try:
        yield environments
    finally:
        environments.close()


def _reset(turn: OpenTurn) -> Reset:
    """What the plan has reset the environment of the turn's group with."""
    row = turn.prompt
    columns = reset_columns(row.prompt, row.columns, row.opening)
    return Reset(columns, group_seed(turn.run_seed, turn.iteration, turn.group), row.opening)


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
