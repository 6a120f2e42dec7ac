"""ScriptedEnvironments: environments without programs, for tests and simulation.

What a turn's answer is, and how long it takes, are pure functions of (run seed, iteration, response, turn), so that an
interrupted conversation must end as an undisturbed one does. Time passes on the caller's clock. A tool server, which
may be shared by many members and outlives them, notes each call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from storage.clock import Clock
from storage.journal.noise_keys import mix64, noise_key
from storage.journal.shard import Finish
from storage.journal.turns import CallRecord, Rebuilt, TurnRecord, call_id, encode_turn
from tasks.turns.environments import Answer, OpenTurn

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class NotedCall:
    """A call that reached the server.

    Attributes:
        at_s: the time of the call, on the server's clock.
        response: the number of the response in the plan.
        end: the number of tokens of the response up to the end of the turn.
        call_id: the id of the call.
        epoch: the epoch of the caller's claim.
        has_effects: whether the call has side effects.
        restarts: the number of times that the response had begun again.
    """

    at_s: float
    response: int
    end: int
    call_id: str
    epoch: int
    has_effects: bool
    restarts: int


@dataclass(slots=True)
class ToolServer:
    """A server outside of all members.

    Attributes:
        now_s: the clock of the server, in seconds.
        calls: the calls that reached the server, in order.
    """

    now_s: Callable[[], float] = lambda: 0.0
    calls: list[NotedCall] = field(default_factory=list)

    def note(self, turn: OpenTurn, name: str, *, has_effects: bool) -> None:
        """Note a call that is made now."""
        end = len(turn.token_ids)
        self.calls.append(NotedCall(self.now_s(), turn.response, end, name, turn.epoch, has_effects, turn.restarts))


@dataclass(frozen=True, slots=True)
class Script:
    """How the environments behave.

    Attributes:
        turns_max: a response's number of turns with a call is drawn from 0 to turns_max - 1.
        answer_tokens_max: the longest observation, in tokens.
        call_s: the mean time of a call; times are drawn uniformly between 0 and twice the mean.
        effects_share: the share of turns whose call has side effects.
        can_be_rebuilt: whether another process can go on with a conversation; else the response begins again.
        losses: the number of a response's first attempts that end with the loss of the environment, at one turn drawn
            from the first four.
        attempts_max: the number of attempts at a response, after which it fails.
    """

    turns_max: int = 4
    answer_tokens_max: int = 5
    call_s: float = 2.0
    effects_share: float = 0.5
    can_be_rebuilt: bool = True
    losses: int = 0
    attempts_max: int = 3


class ScriptedEnvironments:
    """An `Environments` of one member."""

    def __init__(self, script: Script, server: ToolServer, clock: Clock, vocab_size: int) -> None:
        """vocab_size: observations have the token ids 1 to vocab_size - 1; 0 ends the policy's turns."""
        self._script = script
        self._server = server
        self._clock = clock
        self._vocab_size = vocab_size
        self._open: dict[int, tuple[float, Answer]] = {}
        # The turn that the environment of a response expects, by (iteration, response).
        self._kept: dict[tuple[int, int], int] = {}

    def waits_for_journal(self, turn: OpenTurn) -> bool:
        return self._calls(turn) and self._has_effects(turn)

    def begin(self, turns: Sequence[OpenTurn]) -> None:
        now_s = self._clock.monotonic()
        for turn in turns:
            assert turn.response not in self._open, f"response {turn.response} has two open turns"
            self._open[turn.response] = self._answered(turn, now_s)

    def answers(self, wait_s: float) -> list[Answer]:
        if not self._open:
            return []
        first_s = min(ready_s for ready_s, _ in self._open.values())
        wait_s = min(wait_s, first_s - self._clock.monotonic())
        if wait_s > 0:
            self._clock.sleep(wait_s)
        now_s = self._clock.monotonic()
        # A clock may never reach a moment that is nearer than its own rounding.
        ready = [response for response, (ready_s, _) in self._open.items() if ready_s <= now_s + _ROUNDING_S]
        return [self._open.pop(response)[1] for response in ready]

    def forget(self, responses: Sequence[int]) -> None:
        gone = set(responses)
        for response in gone:
            self._open.pop(response, None)
        self._kept = {place: turn for place, turn in self._kept.items() if place[1] not in gone}

    def close(self) -> None:
        self._open.clear()
        self._kept.clear()

    def last_turn(self, turn: OpenTurn) -> int:
        """The number of the first turn that makes no call."""
        return self._word(turn, 0, 1) % self._script.turns_max

    def _calls(self, turn: OpenTurn) -> bool:
        ended_by_stop = turn.token_ids[-1] == 0
        return ended_by_stop and turn.room > self._script.answer_tokens_max and len(turn.events) < self.last_turn(turn)

    def _has_effects(self, turn: OpenTurn) -> bool:
        return self._word(turn, len(turn.events), 2) / _MASK < self._script.effects_share

    def _answered(self, turn: OpenTurn, now_s: float) -> tuple[float, Answer]:
        """When the answer is there, and the answer; the server notes the call at once."""
        number, place = len(turn.events), (turn.iteration, turn.response)
        kept = self._kept.pop(place, None) == number
        if number and not kept and not self._script.can_be_rebuilt:
            return now_s, self._lost(turn, "it cannot be rebuilt")
        if number == self._word(turn, 0, 3) % 4 and turn.restarts < self._script.losses:
            return now_s, self._lost(turn, "its process ended")
        if not self._calls(turn):
            finish = Finish.STOP if turn.token_ids[-1] == 0 and number >= self.last_turn(turn) else Finish.LENGTH
            record = TurnRecord(turn=number, calls=(), seconds=0.0, reward=float(self._word(turn, number, 4) % 5))
            return now_s, Answer(turn.response, turn.epoch, (), encode_turn(record), finish, 0.0)
        self._kept[place] = number + 1
        name = call_id(turn.run_seed, turn.iteration, turn.response, number, 0)
        self._server.note(turn, name, has_effects=self._has_effects(turn))
        word = self._word(turn, number, 5)
        token_ids = tuple(
            1 + mix64((word + index) & _MASK) % (self._vocab_size - 1)
            for index in range(1 + word % self._script.answer_tokens_max)
        )
        took_s = self._script.call_s * (self._word(turn, number, 6) % 1000) / 500
        call = CallRecord(
            call_id=name,
            name="tool",
            arguments={},
            result=" ".join(map(str, token_ids)),
            outcome="answered",
            unknown=turn.unknown,
            seconds=took_s,
        )
        rebuilt: Rebuilt = "kept" if kept else "restored" if number else "new"
        record = TurnRecord(turn=number, calls=(call,), seconds=took_s, rebuilt=rebuilt)
        return now_s + took_s, Answer(turn.response, turn.epoch, token_ids, encode_turn(record), Finish.RUNNING, took_s)

    def _lost(self, turn: OpenTurn, why: str) -> Answer:
        record = TurnRecord(turn=len(turn.events), calls=(), seconds=0.0, failure=why)
        finish = Finish.AGAIN if turn.restarts + 1 < self._script.attempts_max else Finish.FAILED
        return Answer(turn.response, turn.epoch, (), encode_turn(record), finish, 0.0)

    @staticmethod
    def _word(turn: OpenTurn, number: int, stream: int) -> int:
        """64 bits that depend on the response, the number of a turn, and what they are for."""
        key = noise_key(turn.run_seed, turn.iteration, turn.response)
        return mix64((mix64((key + (number + 1) * _GAMMA) & _MASK) + stream) & _MASK)
