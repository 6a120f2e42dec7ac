"""The answer to a turn of the policy: the calls are made, the policy reads the results, and goes on or ends."""

import json
import math
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from storage.digests import digest_of
from storage.journal.shard import EVENT_BYTES_MAX, Finish
from storage.journal.turns import STATE_BYTES_MAX, CallRecord, Outcome, TurnRecord, call_id, decode_turn, encode_turn
from tasks.configuration.turns import TurnsConfig
from tasks.turns.environments import ATTEMPTS_MAX, Answer, OpenTurn
from tasks.turns.living_environments import EnvironmentHistory, EnvironmentLost, LivingEnvironments, cut
from tasks.turns.policy_turn import PolicyTurn, ToolCall
from tasks.turns.tool_processes import Failed, NotBegun, Offer, ProcessLost, Stuck, TimedOut
from tasks.turns.tool_schemas import Schema

# A result may fill an observation; a token rarely stands for more characters.
# After so many calls in a row that name no tool or do not fit one, the response ends.
INVALID_CALLS_MAX = 3
_CHARACTERS_PER_TOKEN = 64
_CHARACTERS_MAX = 1 << 16
_BEGINS_MAX = 10


class TurnCodec(Protocol):
    """The policy's language: how turns are read, and how results are written for it."""

    def read(self, token_ids: Sequence[int]) -> PolicyTurn:
        """The text and the calls of a turn, whose stop token may be among its tokens."""
        ...

    def suffix_ids(self, tool_messages: Sequence[dict[str, Any]]) -> Sequence[int]:
        """The tokens that follow a turn: the given messages, and the prompt for the policy's next turn."""
        ...


CodecOf = Callable[[tuple[Schema, ...]], TurnCodec]
"""The policy's language if prompts tell of these tools."""


class Language:
    """Codecs of turns that several threads may use, and the tokens with which a turn of the policy ends."""

    def __init__(self, codec_of: CodecOf, stop_token_ids: Collection[int]) -> None:
        self._codec_of = codec_of
        self._known: tuple[tuple[Schema, ...], TurnCodec] | None = None
        self._stop_token_ids = frozenset(stop_token_ids)
        # A tokenizer of transformers refuses a second thread while it encodes.
        self._lock = threading.Lock()

    def calls(self, turn: OpenTurn) -> Sequence[ToolCall] | None:
        """The calls of a turn of the policy; None if no stop token ended it."""
        own = turn.token_ids[turn.turn_start :]
        if not own or own[-1] not in self._stop_token_ids:
            return None
        with self._lock:
            return self._codec(turn).read(own).calls

    def observation(self, turn: OpenTurn, calls: Sequence[CallRecord]) -> tuple[int, ...]:
        """The tokens by which the policy reads the results of the calls of a turn."""
        messages = [{"role": "tool", "name": call.name, "content": call.result} for call in calls]
        with self._lock:
            return tuple(self._codec(turn).suffix_ids(messages))

    def _codec(self, turn: OpenTurn) -> TurnCodec:
        """The codec of the turn's plan; from plan to plan of a member's life the tools may change."""
        if self._known is None or self._known[0] != turn.tools:
            self._known = turn.tools, self._codec_of(turn.tools)
        return self._known[1]


class TurnAnswer:
    """One turn on its way from the policy's last token to the answer for the journal."""

    def __init__(self, turn: OpenTurn, config: TurnsConfig, language: Language, living: LivingEnvironments) -> None:
        self._turn = turn
        self._config = config
        self._language = language
        self._living = living
        self._earlier = [decode_turn(event) for event in turn.events]
        self._calls: list[CallRecord] = []
        self._history = EnvironmentHistory(turn, self._earlier, self._calls)
        self._reward: float | None = None

    async def answer(self) -> Answer:
        """Make the calls. Raises ToolsUnusable."""
        begun_s = time.monotonic()
        finish, token_ids, failure = await survived(self._answered(), self._turn)
        record = TurnRecord(
            turn=len(self._earlier),
            calls=tuple(self._calls),
            seconds=time.monotonic() - begun_s,
            reward=self._reward,
            failure=failure,
            rebuilt=self._history.rebuilt,
            diverged=self._history.diverged,
        )
        objects: tuple[tuple[str, bytes], ...] = ()
        if finish is Finish.RUNNING:
            record, objects = _with_state(record, self._history.state)
            self._living.keep(self._turn, objects)
        else:
            self._living.forget(self._turn.response)
        event, problem = as_event(record)
        if problem is not None:
            self._living.forget(self._turn.response)
            event = encode_turn(replace(record, calls=(), state=None, reward=None, failure=problem))
            finish, token_ids, objects = Finish.FAILED, (), ()
        return Answer(
            self._turn.response, self._turn.epoch, token_ids, event, finish, time.monotonic() - begun_s, objects
        )

    async def _answered(self) -> tuple[Finish, tuple[int, ...]]:
        turn = self._turn
        calls = self._language.calls(turn)
        if calls is None or (calls and turn.room == 0):
            finish = Finish.LENGTH
        elif calls and len(self._earlier) + 1 < self._config.turns_max and await self._make(calls):
            token_ids = self._observation()
            # The policy needs room for at least one token.
            if token_ids is not None and len(token_ids) < turn.room:
                return Finish.RUNNING, token_ids
            finish = Finish.LENGTH
        else:
            finish = Finish.STOP
        self._reward = await self._asked_reward()
        return finish, ()

    async def _make(self, calls: Sequence[ToolCall]) -> bool:
        """Make the calls in order; returns whether the policy goes on."""
        offer = await self._living.offer()
        if self._turn.unknown and self._config.on_unknown == "fail":
            for call in calls:
                if call.name in offer.methods or call.name in self._config.side_effects:
                    message = f"an earlier process may have called {call.name}, and turns.on_unknown is fail"
                    raise EnvironmentLost(message, for_good=True)
        invalid = self._invalid_in_a_row()
        for index, call in enumerate(calls):
            problem = call.problem or _unknown_name(call.name, offer)
            if problem is None:
                self._calls.append(await self._made(index, call, offer))
                invalid = 0
                continue
            self._calls.append(self._record(index, call, f"error: {problem}", "invalid", 0.0))
            invalid += 1
            if invalid >= INVALID_CALLS_MAX:
                return False
        return True

    def _invalid_in_a_row(self) -> int:
        count = 0
        for record in reversed([call for turn in self._earlier for call in turn.calls]):
            if record.outcome != "invalid":
                break
            count += 1
        return count

    async def _made(self, index: int, call: ToolCall, offer: Offer) -> CallRecord:
        begun_s = time.monotonic()
        request = {
            "do": "call",
            "name": call.name,
            "arguments": call.arguments,
            "characters_max": self._characters_max(),
            "current": [self._call_id(index), self._turn.epoch, self._turn.iteration, self._turn.response],
        }
        # With "fail", what may have changed something is not called a second time.
        once = self._config.on_unknown == "fail" and call.name in self._config.side_effects
        again = alone = False
        while True:
            try:
                reply = await self._asked(request, in_environment=call.name in offer.methods, alone=alone)
            except TimedOut:
                text = f"error: timed out after {self._config.call_time_limit_s:g} s"
                return self._record(index, call, text, "timed_out", begun_s, again=again)
            except ProcessLost as lost:
                # In a process that other calls cannot disturb, a call has another chance.
                if once or (again and not isinstance(lost, Stuck)):
                    text = f"error: the tool's process {lost}"
                    return self._record(index, call, text, "lost", begun_s, again=again)
                again, alone = True, alone or isinstance(lost, Stuck)
            else:
                result = self._cut(reply["result"])
                return self._record(index, call, result, reply["outcome"], begun_s, again=again)

    async def _asked(self, request: dict[str, Any], *, in_environment: bool, alone: bool) -> dict[str, Any]:
        """The reply of the environment, or of any process; raises TimedOut, ProcessLost and EnvironmentLost.

        alone: it is in a process of its own.
        """
        for _ in range(_BEGINS_MAX):
            try:
                if in_environment:
                    return await self._living.ask(self._history, request, self._config.call_time_limit_s, alone=alone)
                return await self._living.ask_any(request, self._config.call_time_limit_s, alone=alone)
            except NotBegun:
                continue
            except Failed as failed:
                raise EnvironmentLost(str(failed)) from None
        raise EnvironmentLost("its processes end before they begin")

    async def _asked_reward(self) -> float | None:
        if not (await self._living.offer()).has_reward:
            return None
        alone = False
        for _ in range(2):
            try:
                reply = await self._asked({"do": "reward"}, in_environment=True, alone=alone)
            except TimedOut:
                limit = f"{self._config.call_time_limit_s:g} s"
                raise EnvironmentLost(f"get_reward takes longer than turns.call_time_limit_s, {limit}") from None
            except ProcessLost as lost:
                told, alone = str(lost), isinstance(lost, Stuck)
            else:
                value: float | None = reply["reward"]
                return value
        raise EnvironmentLost(f"its process {told} during get_reward")

    def _record(
        self, index: int, call: ToolCall, result: str, outcome: Outcome, begun_s: float, *, again: bool = False
    ) -> CallRecord:
        """again: a process that ended during the call may have made it before."""
        made = outcome != "invalid"
        return CallRecord(
            call_id=self._call_id(index),
            name=call.name,
            arguments=call.arguments,
            result=result,
            outcome=outcome,
            unknown=(self._turn.unknown or again) and made,
            seconds=time.monotonic() - begun_s if made else 0.0,
        )

    def _call_id(self, index: int) -> str:
        turn = self._turn
        return call_id(turn.run_seed, turn.iteration, turn.response, len(self._earlier), index)

    def _characters_max(self) -> int:
        return min(_CHARACTERS_MAX, _CHARACTERS_PER_TOKEN * self._config.observation_tokens_max)

    def _cut(self, result: str) -> str:
        most = self._characters_max()
        return result if len(result) <= most else cut(result, most)

    def _observation(self) -> tuple[int, ...] | None:
        """The tokens of the results, which are cut until they are few enough; None if they never are."""
        most = self._config.observation_tokens_max
        longest = max(len(call.result) for call in self._calls)
        token_ids = self._language.observation(self._turn, self._calls)
        while len(token_ids) > most and longest:
            longest = min(longest - 1, math.floor(0.95 * longest * most / len(token_ids)))
            self._calls[:] = [
                call if len(call.result) <= longest else replace(call, result=cut(call.result, longest))
                for call in self._calls
            ]
            token_ids = self._language.observation(self._turn, self._calls)
        return token_ids if len(token_ids) <= most else None


def _unknown_name(name: str, offer: Offer) -> str | None:
    names = sorted(offer.methods | offer.functions)
    return None if name in names else f"there is no tool {name!r}; there are: {', '.join(names)}"


async def survived(
    answered: Awaitable[tuple[Finish, tuple[int, ...]]], turn: OpenTurn
) -> tuple[Finish, tuple[int, ...], str | None]:
    """Await the answer to a turn; returns the finish, the tokens of the observation, and why the environment is lost.

    After a loss the response begins again, unless the loss is for good or ATTEMPTS_MAX is reached.
    """
    try:
        finish, token_ids = await answered
    except EnvironmentLost as lost:
        again = not lost.for_good and turn.restarts + 1 < ATTEMPTS_MAX
        return Finish.AGAIN if again else Finish.FAILED, (), str(lost).encode("utf-8", "replace").decode()
    return finish, token_ids, None


def as_event(record: TurnRecord) -> tuple[bytes, str | None]:
    """The bytes of a record, and why no reader would take them; None if one would."""
    try:
        event = encode_turn(record)
        decode_turn(event)
    except (ValueError, RecursionError) as error:
        return b"", f"the record of the turn cannot be stored: {' '.join(str(error).split())[:200]}"
    if len(event) > EVENT_BYTES_MAX:
        return event, f"the record of the turn has {len(event)} bytes; allowed: {EVENT_BYTES_MAX}"
    return event, None


def _with_state(record: TurnRecord, state: Any) -> tuple[TurnRecord, tuple[tuple[str, bytes], ...]]:
    """The record with a state, in it or beside it as an object."""
    if state is None:
        return record, ()
    body = json.dumps(state, sort_keys=True, separators=(",", ":")).encode()
    if len(body) <= STATE_BYTES_MAX:
        return replace(record, state=state), ()
    digest = digest_of(body)
    return replace(record, state_object=digest), ((digest, body),)
