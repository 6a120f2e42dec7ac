"""The environments that live in child processes: each response has an environment, built at the first need.

A lost environment, or the environment of a response taken from another member, is rebuilt from the recorded turns by a
method of its class (set_state or restore), or with `turns.replay` by a repetition of the calls on a new instance.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from resources.user_process import LOAD_TIME_LIMIT_S
from storage.digests import digest_of
from storage.journal.turns import CallRecord, TurnRecord
from storage.stores.store import StoreUnavailable
from tasks.configuration.turns import TurnsConfig
from tasks.turns.environments import OpenTurn
from tasks.turns.tool_processes import (
    Failed,
    NotBegun,
    Offer,
    ProcessLost,
    Stuck,
    TimedOut,
    ToolProcess,
    ToolProcesses,
)

_BUILDS_MAX = 3
_READ_AGAIN_S = (0.5, 2.0, 10.0)
# Of these, the environment may hold a part, and making them again gives no result to compare.
_UNFINISHED = ("timed_out", "lost")
CUT_MARK = "\n[cut: the result is longer than allowed]"


class EnvironmentLost(Exception):  # noqa: N818 - reads as what happened
    """The environment is gone and cannot be rebuilt; the message says why. for_good: beginning again cannot help."""

    def __init__(self, message: str, *, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


@dataclass(frozen=True, slots=True)
class Reset:
    """The reset with which the plan began a group's environment.

    Attributes:
        columns: the columns of the prompt's row, by name.
        seed: the seed of the group.
        opening: the text that the reset returned; None: no text.
    """

    columns: dict[str, Any]
    seed: int
    opening: str | None


class EnvironmentHistory:
    """The history of a response's environment, up to the calls of the turn that is being answered.

    Attributes:
        turn: the turn that is being answered.
        earlier: the records of earlier turns.
        calls: the calls of the turn so far; the list grows.
        state: the latest state after a call of the turn.
        rebuilt: as in TurnRecord.
        diverged: as in TurnRecord.
    """

    def __init__(self, turn: OpenTurn, earlier: Sequence[TurnRecord], calls: Sequence[CallRecord]) -> None:
        self.turn = turn
        self.earlier = earlier
        self.calls = calls
        self.state: Any = None
        self.rebuilt: Literal["kept", "new", "state", "restored", "replayed"] = "kept"
        self.diverged = False

    def made(self, methods: frozenset[str]) -> list[list[CallRecord]]:
        """By turn, the calls that the environment was asked to answer."""
        turns = [*(record.calls for record in self.earlier), self.calls]
        return [[call for call in calls if call.name in methods and call.outcome != "invalid"] for calls in turns]


@dataclass(slots=True)
class _Place:
    """The place of a response's environment, and its progress.

    Attributes:
        process: the process in which the environment lives.
        number: the number of the environment in its requests.
        iteration: the iteration of the response.
        turns: the number of turns that the environment has answered.
        restarts: the number of times that the response had begun again.
    """

    process: ToolProcess
    number: int
    iteration: int
    turns: int
    restarts: int


class LivingEnvironments:
    """The environments of a member's responses, and the processes of its tools. One event loop uses it."""

    def __init__(
        self,
        config: TurnsConfig,
        processes: ToolProcesses,
        resets: Callable[[OpenTurn], Reset],
        read_object: Callable[[int, str], bytes],
    ) -> None:
        """read_object: the bytes of a state by iteration and digest; it may take its time, and raise."""
        self._config = config
        self._processes = processes
        self._resets = resets
        self._read_object = read_object
        self._numbers = itertools.count()
        self._places: dict[int, _Place] = {}
        # The last large state of each response by its digest: it may not be stored yet.
        self._objects: dict[int, tuple[str, bytes]] = {}
        self._offer: Offer | None = None

    async def offer(self) -> Offer:
        """The names of the tools, and the abilities of the environment's class. Raises ToolsUnusable."""
        if self._offer is None:
            self._offer = (await self._processes.chosen())[1]
        return self._offer

    async def ask_any(self, request: dict[str, Any], limit_s: float, *, alone: bool) -> dict[str, Any]:
        """Make a request that needs no environment; raises ProcessLost, TimedOut, NotBegun and Failed.

        alone: in a process of its own.
        """
        process = await self._processes.alone() if alone else (await self._processes.chosen())[0]
        return await process.ask({**request, "number": None}, limit_s)

    async def ask(
        self, history: EnvironmentHistory, request: dict[str, Any], limit_s: float, *, alone: bool
    ) -> dict[str, Any]:
        """Make a request of the response's environment, which is built or rebuilt if need be.

        alone: whether a process of its own is started for a new environment. Raises EnvironmentLost, ProcessLost,
        TimedOut, NotBegun and Failed; every error but Failed ends the environment.
        """
        place = self._place(history) or await self._built(history, alone=alone)
        try:
            reply = await place.process.ask({**request, "number": place.number}, limit_s)
        except (ProcessLost, TimedOut, NotBegun):
            self._drop(history.turn.response)
            raise
        history.state = reply.get("state", history.state)
        return reply

    def keep(self, turn: OpenTurn, objects: Sequence[tuple[str, bytes]]) -> None:
        """The turn is answered; its environment waits for the next one. objects: its state, if that is large."""
        place = self._places.get(turn.response)
        if place is not None and _is_at(place, turn):
            place.turns = len(turn.events) + 1
        else:
            # It stayed behind while another member had the response, or in an earlier iteration.
            self._drop(turn.response)
        if objects:
            self._objects[turn.response] = objects[0]

    def forget(self, response: int) -> None:
        """The response is over, or is not this member's any more."""
        self._objects.pop(response, None)
        self._drop(response)

    def _drop(self, response: int) -> None:
        """Stop using the environment of a response, if there is one."""
        place = self._places.pop(response, None)
        if place is not None:
            place.process.forget(place.number)

    def _place(self, history: EnvironmentHistory) -> _Place | None:
        """Where the environment lives, if it has answered just the turns that are recorded and may be used."""
        turn = history.turn
        place = self._places.get(turn.response)
        if place is None:
            return None
        if _is_at(place, turn) and not place.process.lost and (not place.process.retired or not self._rebuilds()):
            return place
        self._drop(turn.response)
        return None

    def _rebuilds(self) -> bool:
        offer = self._offer
        return self._config.replay or (offer is not None and (offer.has_state or offer.restores))

    async def _built(self, history: EnvironmentHistory, *, alone: bool) -> _Place:
        """A new instance at the present moment of the response."""
        turn, reset = history.turn, self._resets(history.turn)
        offer = await self.offer()
        made = history.made(offer.methods)
        how, more = await self._way(history, offer, made)
        request = {"do": "build", "columns": reset.columns, "seed": reset.seed, **more}
        place, text = await self._started(turn, request, alone=alone)
        history.rebuilt = how
        self._places[turn.response] = place
        if text != reset.opening:
            self._diverged(history, "reset returned another text than when the iteration was planned")
        if how == "replayed":
            await self._replay(history, place, made)
        return place

    async def _started(self, turn: OpenTurn, request: dict[str, Any], *, alone: bool) -> tuple[_Place, str | None]:
        told = ""
        for _ in range(_BUILDS_MAX):
            number = next(self._numbers)
            process = await self._processes.alone() if alone else (await self._processes.chosen())[0]
            if alone:
                process.environments.add(number)  # it would end without one
            try:
                reply = await process.ask({**request, "number": number}, LOAD_TIME_LIMIT_S)
            except (ProcessLost, NotBegun, TimedOut, Failed) as error:
                process.forget(number)
                alone = alone or isinstance(error, Stuck)
                told = self._problem_of_build(error)
            except asyncio.CancelledError:
                process.forget(number)
                raise
            else:
                process.environments.add(number)
                return _Place(process, number, turn.iteration, len(turn.events), turn.restarts), reply["text"]
        raise EnvironmentLost(f"it cannot be built: {told}")

    def _problem_of_build(self, error: Exception) -> str:
        """Why an environment was not built, if a second try may help; else raises EnvironmentLost."""
        if isinstance(error, TimedOut):
            raise EnvironmentLost(f"building it takes longer than {LOAD_TIME_LIMIT_S:g} s") from None
        if isinstance(error, Failed):
            raise EnvironmentLost(f"it cannot be built: {error}") from None
        return f"its process {error}" if isinstance(error, ProcessLost) else "its processes end before they begin"

    async def _way(
        self, history: EnvironmentHistory, offer: Offer, made: Sequence[Sequence[CallRecord]]
    ) -> tuple[Literal["new", "state", "restored", "replayed"], dict[str, Any]]:
        """The way to build the environment, and the fields of the request that builds it."""
        if not any(made):
            return "new", {}
        if offer.has_state:
            state = history.state if history.state is not None else await self._recorded_state(history)
            # Without one, no call has come to an end.
            return ("new", {}) if state is None else ("state", {"state": state})
        if offer.restores:
            told = [
                {"calls": [{"name": c.name, "arguments": c.arguments, "result": c.result} for c in calls]}
                for calls in (made if made[-1] else made[:-1])
            ]
            return "restored", {"turns": told}
        if self._config.replay:
            return "replayed", {}
        has_effects = any(call.name in self._config.side_effects for calls in made for call in calls)
        raise EnvironmentLost(
            "it is not in this process, and its class has neither set_state nor restore",
            # To begin again would make these calls again.
            for_good=self._config.on_unknown == "fail" and has_effects,
        )

    async def _recorded_state(self, history: EnvironmentHistory) -> Any:
        for record in reversed(history.earlier):
            if record.state is not None:
                return record.state
            if record.state_object is not None:
                return await self._read(history.turn, record.state_object)
        return None

    async def _read(self, turn: OpenTurn, digest: str) -> Any:
        name, body = self._objects.get(turn.response, ("", b""))
        if name == digest:
            return json.loads(body)
        for wait_s in itertools.chain(_READ_AGAIN_S, itertools.repeat(_READ_AGAIN_S[-1])):
            try:
                body = await asyncio.to_thread(self._read_object, turn.iteration, digest)
                break
            except StoreUnavailable:
                # It is there; to begin the response again would cost more than to wait.
                await asyncio.sleep(wait_s)
            except Exception as error:  # noqa: BLE001 - whatever a store raises
                raise EnvironmentLost(f"its state {digest} cannot be read: {error}") from None
        if digest_of(body) != digest:
            raise EnvironmentLost(f"its state {digest} is damaged")
        return json.loads(body)

    async def _replay(self, history: EnvironmentHistory, place: _Place, made: Sequence[Sequence[CallRecord]]) -> None:
        for call in _finished(made):
            request = {
                "do": "call",
                "number": place.number,
                "name": call.name,
                "arguments": call.arguments,
                "characters_max": len(call.result) + 1,
                "current": [call.call_id, history.turn.epoch, history.turn.iteration, history.turn.response],
            }
            try:
                reply = await place.process.ask(request, self._config.call_time_limit_s)
            except Stuck:
                self._drop(history.turn.response)
                raise
            except (ProcessLost, TimedOut, NotBegun, Failed) as error:
                self._drop(history.turn.response)
                why = str(error) or type(error).__name__
                raise EnvironmentLost(f"{call.name}, called again, has no result: {why}") from None
            if not same_result(call.result, reply["result"]):
                self._diverged(history, f"{call.name}, called again, gave another result")

    def _diverged(self, history: EnvironmentHistory, why: str) -> NoReturn:
        history.diverged = True
        self._drop(history.turn.response)
        raise EnvironmentLost(why)


def _finished(made: Sequence[Sequence[CallRecord]]) -> Iterator[CallRecord]:
    return (call for calls in made for call in calls if call.outcome not in _UNFINISHED)


def _is_at(place: _Place, turn: OpenTurn) -> bool:
    """Whether an environment has answered exactly the turns before `turn`."""
    return (place.iteration, place.turns, place.restarts) == (turn.iteration, len(turn.events), turn.restarts)


def cut(result: str, characters: int) -> str:
    """The first `characters` of a call's result, marked as cut; a second cut adds no second mark."""
    return result.removesuffix(CUT_MARK)[:characters] + CUT_MARK


def same_result(recorded: str, result: str) -> bool:
    """Whether a repeated call gives the recorded result, which may have been cut."""
    if recorded == result:
        return True
    return recorded.endswith(CUT_MARK) and result.startswith(recorded.removesuffix(CUT_MARK))
