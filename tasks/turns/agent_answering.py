"""The answer to a turn of the policy for an agent, which reads the turn, and sends its next request or ends.

After a kill the agent runs again from its beginning. Its requests are answered with the recorded turns as long as they
add the recorded tokens. With any further tokens the agent has diverged, and the response begins again.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NoReturn

from resources.user_process import LOAD_TIME_LIMIT_S
from storage.journal.shard import Finish
from storage.journal.turns import Rebuilt, TurnRecord, added_messages, call_id, decode_turn, encode_turn
from tasks.configuration.turns import TurnsConfig
from tasks.prompts.prompt import PromptError
from tasks.turns.agent_language import AgentLanguage
from tasks.turns.agent_program import AgentProgram
from tasks.turns.agent_programs import AgentPrograms
from tasks.turns.answering import as_event, survived
from tasks.turns.chat_reply import Completion, served_calls
from tasks.turns.chat_request import ChatRequest, Refusal
from tasks.turns.environments import Answer, OpenTurn
from tasks.turns.first_request import read_opening
from tasks.turns.living_environments import EnvironmentLost, Reset
from tasks.turns.own_template import Message
from tasks.turns.tool_processes import Failed, NotBegun, ProcessLost, TimedOut

_LIVES_MAX = 5
_ADDED_ROLES = ("tool", "user", "system", "developer")


@dataclass(frozen=True, slots=True)
class _TurnSpan:
    """A turn of the policy among the tokens of its response.

    Attributes:
        number: the number of the turn in the response.
        start: the position of the turn's first token.
        end: the position behind the turn's last token.
        first: the index of the turn's first log-prob among the response's log-probs.
    """

    number: int
    start: int
    end: int
    first: int


class AgentAnswer:
    """One turn on its way from the policy's last token to the agent's next request or end."""

    def __init__(
        self,
        turn: OpenTurn,
        config: TurnsConfig,
        language: AgentLanguage,
        programs: AgentPrograms,
        stop_token_ids: Collection[int],
        reset: Reset,
    ) -> None:
        """reset: the arguments with which the plan began the agent, and the agent's first request as `opening`."""
        self._turn = turn
        self._reset = reset
        self._config = config
        self._language = language
        self._programs = programs
        self._stop_token_ids = stop_token_ids
        self._earlier = [decode_turn(event) for event in turn.events]
        own = len(turn.token_ids) - turn.turn_start
        self._span = _TurnSpan(len(self._earlier), turn.turn_start, len(turn.token_ids), len(turn.logprobs) - own)
        self._rebuilt: Rebuilt = "kept"
        self._diverged = False
        self._reward: float | None = None
        self._added: list[Message] | None = None

    async def answer(self) -> Answer:
        """Serve the turn, and wait for the agent's next request or end. Raises ToolsUnusable."""
        begun_s = time.monotonic()
        finish, token_ids, failure = await survived(self._answered(), self._turn)
        record = TurnRecord(
            turn=len(self._earlier),
            calls=(),
            seconds=time.monotonic() - begun_s,
            reward=self._reward,
            failure=failure,
            rebuilt=self._rebuilt,
            diverged=self._diverged,
            messages=None if self._added is None else list(self._added),
        )
        event, problem = as_event(record)
        if problem is not None:
            event = encode_turn(replace(record, messages=None, reward=None, failure=problem))
            finish, token_ids, failure = Finish.FAILED, (), problem
        if finish is Finish.RUNNING:
            self._programs.keep(self._turn)
        else:
            self._programs.forget(self._turn.response, failure or "the response has ended")
        return Answer(self._turn.response, self._turn.epoch, token_ids, event, finish, time.monotonic() - begun_s)

    async def _answered(self) -> tuple[Finish, tuple[int, ...]]:
        told = ""
        for _ in range(_LIVES_MAX):
            try:
                return await self._served()
            except ProcessLost as lost:
                told = str(lost)
            except NotBegun:
                told = "was ended before it began"
            self._programs.forget(self._turn.response, "the agent's process is lost")
        raise EnvironmentLost(f"the agent's process {told}")

    async def _served(self) -> tuple[Finish, tuple[int, ...]]:
        turn, limit_s = self._turn, self._config.call_time_limit_s
        program = self._programs.kept(turn)
        if program is None:
            self._rebuilt = "replayed" if self._earlier else "new"
            program = await self._programs.started(turn, self._reset)
            await self._replay(program)
        stopped = bool(turn.token_ids) and turn.token_ids[-1] in self._stop_token_ids
        self._deliver(program, self._span, "stop" if stopped else "length")
        limit = self._limit(stopped=stopped)
        if limit is not None:
            program.refuse(limit)
        request = await self._next(program, limit_s, is_limited=not stopped)
        if request is not None and limit is None:
            added, token_ids = self._observation(program, request)
            if len(token_ids) <= self._config.observation_tokens_max and len(token_ids) < turn.room:
                program.accept(request)
                self._added = added
                return Finish.RUNNING, token_ids
            program.refuse(_too_long(len(token_ids), min(self._config.observation_tokens_max, turn.room - 1)))
            await self._next(program, limit_s, is_limited=True)
        is_limited = not stopped or program.was_refused
        self._reward = self._asked_reward(program, is_limited=is_limited)
        return (Finish.LENGTH if is_limited else Finish.STOP), ()

    def _limit(self, *, stopped: bool) -> Refusal | None:
        """Why no request is answered after this turn; None if one is."""
        if not stopped or self._turn.room == 0:
            message = "sampling.max_completion_length is reached: the response has ended"
            return Refusal(message, code="context_length_exceeded", param="messages")
        if len(self._earlier) + 1 >= self._config.turns_max:
            return Refusal(f"turns.turns_max, {self._config.turns_max}, is reached", code="turns_max")
        return None

    async def _replay(self, program: AgentProgram) -> None:
        """Answer every request before the present turn with its recorded turn; the last request waits for the turn."""
        turn = self._turn
        first = read_opening(turn.prompt.opening)
        request = await self._next(program, LOAD_TIME_LIMIT_S)
        if request is None:
            self._diverge("the agent ended without a request")
        if request.tools != first.tools or self._prompt_ids(request) != turn.prompt.token_ids:
            self._diverge("the agent's first request is not the one of the plan")
        program.accept(request)
        start = first_logprob = 0
        for record in self._earlier:
            end = self._end_of_turn(start)
            self._deliver(program, _TurnSpan(record.turn, start, end, first_logprob), "stop")
            request = await self._next(program, self._config.call_time_limit_s)
            if request is None:
                self._diverge(f"the agent ended after turn {record.turn}, and went on before")
            _, token_ids = self._observation(program, request)
            recorded = self._language.suffix_ids(added_messages(record), program.tools)
            if token_ids != recorded or turn.token_ids[end : end + len(token_ids)] != token_ids:
                self._diverge(f"the agent's request after turn {record.turn} is not the recorded one")
            program.accept(request)
            first_logprob, start = first_logprob + end - start, end + len(token_ids)
        if start != turn.turn_start:
            self._diverge("the recorded conversation has other turns")

    def _end_of_turn(self, start: int) -> int:
        """The position behind the stop token that ended a turn of the policy."""
        ids = self._turn.token_ids
        ends = (place + 1 for place in range(start, len(ids)) if ids[place] in self._stop_token_ids)
        return next(ends, len(ids))

    async def _next(self, program: AgentProgram, limit_s: float, *, is_limited: bool = False) -> ChatRequest | None:
        """The agent's next request; None if it has ended. is_limited: a time-out is no loss of the environment."""
        try:
            return await program.next_request(limit_s)
        except TimedOut:
            if is_limited or program.was_refused:
                return None
            raise EnvironmentLost(f"the agent took longer than {limit_s:g} s to its next request, or its end") from None

    def _asked_reward(self, program: AgentProgram, *, is_limited: bool) -> float | None:
        """The agent's return value; 0 if the agent raises or hangs because the policy has reached a limit."""
        if not program.has_ended:
            return 0.0
        try:
            return program.reward()
        except Failed as failed:
            if is_limited:
                return 0.0
            raise EnvironmentLost(f"the agent raised {failed}") from None

    def _observation(self, program: AgentProgram, request: ChatRequest) -> tuple[list[Message], tuple[int, ...]]:
        """The messages that a request adds to the conversation, and the tokens of these messages."""
        known = len(program.messages)
        added = list(request.messages[known:])
        if request.tools != program.tools:
            self._diverge("the tools of the agent's request are not those of its first one")
        if request.messages[:known] != program.messages or not added:
            self._diverge("the messages of the agent's request do not go on with the conversation")
        if any(message["role"] not in _ADDED_ROLES for message in added):
            self._diverge("the agent's request holds a message of the assistant that the policy did not write")
        try:
            return added, self._language.suffix_ids(added, program.tools)
        except PromptError as error:
            raise EnvironmentLost(f"the agent's request cannot follow: {error}") from None

    def _prompt_ids(self, request: ChatRequest) -> tuple[int, ...]:
        try:
            return self._language.prompt_ids(request.messages, request.tools)
        except Exception:  # noqa: BLE001 - a template is a program of the model's author
            return ()

    def _deliver(self, program: AgentProgram, span: _TurnSpan, ended_by: str) -> None:
        """Answer the request that waits with a turn of the policy."""
        turn = self._turn
        ids = turn.token_ids[span.start : span.end]
        spoken = self._language.spoken(ids, program.tools)
        names = [
            call_id(turn.run_seed, turn.iteration, turn.response, span.number, index)
            for index in range(1 + len(spoken.calls))
        ]
        calls = served_calls(spoken.calls, names[1:])
        program.deliver(
            Completion(
                name=names[0],
                content=spoken.content,
                thinking=spoken.thinking,
                calls=calls,
                finish_reason="length" if ended_by == "length" else "tool_calls" if calls else "stop",
                prompt_tokens=len(turn.prompt.token_ids) + span.start,
                pieces=self._language.pieces(ids),
                logprobs=turn.logprobs[span.first : span.first + len(ids)],
                created_s=int(time.time()),
            ),
            spoken.message,
        )

    def _diverge(self, why: str) -> NoReturn:
        self._diverged = True
        raise EnvironmentLost(why)


def _too_long(length: int, most: int) -> Refusal:
    message = (
        f"the new messages have {length} tokens; allowed: {most} (turns.observation_tokens_max, and what "
        "sampling.max_completion_length leaves): the response has ended"
    )
    return Refusal(message, code="context_length_exceeded", param="messages")
