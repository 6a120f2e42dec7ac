"""Holdings: the responses that an incarnation holds, the state of each, and its tokens that are in no shard yet."""

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from storage.journal.journal import PendingRows
from storage.journal.shard import Finish
from tasks.sampling.engines.engine import FinishReason, TokenDelta
from tasks.sampling.session.actions import ClaimedResponse, HeldTurn
from tasks.turns.environments import Answer

FINISH = {FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}


@dataclass(slots=True)
class Held:
    """A response to extend.

    Attributes:
        epoch: the epoch of the claim.
        token_ids: the tokens so far, journalled or not.
        logprobs: the log-probs of the policy's tokens, in a run with turns.
        events: the answers to the turns so far, journalled or not.
        turn_start: as in ClaimedResponse.
        restarts: as in ClaimedResponse.
    """

    epoch: int
    token_ids: list[int]
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    events: list[bytes] = field(default_factory=list)
    turn_start: int = 0
    restarts: int = 0


@dataclass(slots=True)
class Owed:
    """The answer that an environment owes to a turn.

    Attributes:
        unknown: whether an earlier incarnation may have made the calls of the turn.
        journalled: whether the turn is in the journal.
        begun: whether the turn is being answered.
        has_effects: whether the turn must be in the journal before an environment answers.
    """

    unknown: bool
    journalled: bool
    begun: bool = False
    has_effects: bool = False


@dataclass(slots=True)
class Holdings:
    """The responses of an incarnation by state: each response in `held` is in `waiting`, `in_flight` or `acting`.

    Attributes:
        own: the responses that the plan gives to the slot.
        batch_max: the most responses that the member decodes together while it holds any of `own`; None: no limit.
        has_turns: whether a response that the engine has ended goes to `acting`.
        state: the state in the member's heartbeat.
        held: the responses to extend, in the order of taking.
        waiting: responses that wait for a place in the engine.
        in_flight: responses in the engine.
        acting: responses whose turn an environment answers, without a place in the engine.
        forgotten: responses no longer held that the engine or an environment still has; their results are ignored
            until they are aborted.
        released: the epoch of the claim by released response.
        ended: the epoch of the claim by ended response.
        pending: the rows for the next shard.
        ends: the number of ends; a response that ended twice, under two claims, counts twice.
        generated: the number of tokens received from the engine.
    """

    own: frozenset[int] = frozenset()
    batch_max: int | None = None
    has_turns: bool = False

    state: Literal["loading", "working", "gone"] = "loading"
    held: dict[int, Held] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    in_flight: set[int] = field(default_factory=set)
    acting: dict[int, Owed] = field(default_factory=dict)
    _finish: dict[FinishReason, Finish] = field(init=False)
    forgotten: set[int] = field(default_factory=set)
    released: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    pending: PendingRows = field(default_factory=PendingRows)
    ends: int = 0
    generated: int = 0

    def __post_init__(self) -> None:
        self._finish = dict.fromkeys(FinishReason, Finish.ACTING) if self.has_turns else FINISH

    @property
    def is_isolated(self) -> bool:
        """Whether the plan's batch_max applies: the member still holds a response that the plan gave to its slot."""
        return self.batch_max is not None and not self.own.isdisjoint(self.held)

    def batch_limit(self, engine_max: int) -> int:
        """The most responses to decode together now, on an engine that can decode `engine_max`."""
        return min(self.batch_max or engine_max, engine_max) if self.is_isolated else engine_max

    def take(self, work: ClaimedResponse) -> None:
        """Hold a response; a response held under an earlier claim continues from the tokens of the new claim."""
        if work.response in self.held:
            self.let_go({work.response})
        self.held[work.response] = Held(
            work.epoch,
            list(work.prefix),
            array("f", work.logprobs if self.has_turns else ()),
            list(work.events),
            work.turn_start,
            work.restarts,
        )
        self.released.pop(work.response, None)
        if work.owes:
            self.acting[work.response] = Owed(unknown=True, journalled=True)
        else:
            self.waiting.append(work.response)

    def admit(self, engine_max: int) -> list[int]:
        """Move the first waiting responses into flight as far as the room goes, and return the moved responses."""
        room = self.batch_limit(engine_max) - len(self.in_flight)
        responses = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
        self.in_flight.update(responses)
        return responses

    def begin_again(self) -> None:
        """Note that the engine lost everything: the state is "loading", and held responses wait in order of taking."""
        self.state = "loading"
        self.waiting = deque(response for response in self.held if response not in self.acting)
        self.in_flight.clear()
        # The engine has forgotten all; environments have not.
        self.forgotten = {response for response in self.forgotten if self.has_turns and response not in self.held}

    def stop_decoding(self) -> None:
        """Note that nothing is decoded or answered any more; responses in work are to be aborted, and wait."""
        self.forgotten |= set(self.held) if self.has_turns else self.in_flight
        self.in_flight.clear()
        self.acting.clear()
        self.waiting = deque(self.held)

    def record(self, delta: TokenDelta) -> None:
        """Keep the engine's tokens for a response, unless the response is no longer in flight.

        The method runs once for every token of every response, and an enum's hash and properties are slow, so nothing
        is looked up for a response that goes on.
        """
        response, reason = delta.response, delta.finish_reason
        if response not in self.in_flight:
            return
        held, new = self.held[response], delta.token_ids
        known = held.token_ids
        finish = Finish.RUNNING if reason is None else self._finish[reason]
        self.pending.append(response, held.epoch, len(known), new, delta.logprobs, finish)
        known += new
        self.generated += len(new)
        if self.has_turns:
            held.logprobs.extend(delta.logprobs)
        if reason is not None:
            self.in_flight.remove(response)
            if self.has_turns:
                self.acting[response] = Owed(unknown=False, journalled=False)
            else:
                self._end(response)

    def _end(self, response: int) -> None:
        self.ended[response] = self.held.pop(response).epoch
        self.ends += 1

    def turns_to_begin(self) -> tuple[HeldTurn, ...]:
        """The turns that can be answered now and are not."""
        found = []
        for response, owed in self.acting.items():
            if not owed.begun and (owed.journalled or not owed.has_effects):
                held = self.held[response]
                so_far = tuple(held.token_ids), tuple(held.logprobs), tuple(held.events), held.turn_start
                turn = HeldTurn(response, held.epoch, *so_far, owed.unknown, held.restarts, owed.journalled)
                found.append(turn)
        return tuple(found)

    def note_begun(self, turns: Sequence[HeldTurn], effects: Collection[int]) -> None:
        """Note that the journalled turns, and the turns of responses not in `effects`, are being answered."""
        for turn in turns:
            owed = self.acting.get(turn.response)
            if owed is not None and self.held[turn.response].epoch == turn.epoch:
                owed.has_effects = turn.response in effects
                owed.begun = turn.journalled or not owed.has_effects

    @property
    def is_answered(self) -> bool:
        """Whether any turn is being answered."""
        return any(owed.begun for owed in self.acting.values())

    def answer(self, answer: Answer) -> bool:
        """Append an answer to its response, for which the engine goes on or the end has come; False: not wanted."""
        response, owed = answer.response, self.acting.get(answer.response)
        if owed is None or not owed.begun or self.held[response].epoch != answer.epoch:
            return False
        del self.acting[response]
        held = self.held[response]
        start = len(held.token_ids)
        self.pending.observe(response, held.epoch, start, answer.token_ids, answer.event, answer.finish)
        self.pending.objects.update(answer.objects)
        if answer.finish is Finish.RUNNING:
            held.token_ids += answer.token_ids
            held.events.append(answer.event)
            held.turn_start = len(held.token_ids)
            # It goes first: what the engine still has of it may soon be overwritten.
            self.waiting.appendleft(response)
        elif answer.finish is Finish.AGAIN:
            self.held[response] = Held(held.epoch, [], restarts=held.restarts + 1)
            self.waiting.append(response)
        else:
            self._end(response)
        return True

    def release(self, responses: Collection[int]) -> None:
        """Free responses for other members as soon as the pending tokens are journalled."""
        for response in responses:
            held = self.held[response]
            self.pending.append(response, held.epoch, len(held.token_ids), (), (), Finish.RELEASED)
            self.released[response] = held.epoch
        self._stop_holding(set(responses))

    def see(self, owned: dict[int, int]) -> int:
        """Let go of responses claimed by another member, and return the number of held responses lost thereby.

        owned: the epochs of the incarnation's present claims by response.
        """
        for response in [r for r, epoch in self.released.items() if owned.get(r) != epoch]:
            del self.released[response]
        lost = {response for response, held in self.held.items() if owned.get(response) != held.epoch}
        self.let_go(lost)
        return len(lost)

    def let_go(self, responses: set[int]) -> None:
        """Stop holding the given responses, and drop the pending tokens, which do not count."""
        self.pending.drop(responses)
        self._stop_holding(responses)

    def take_pending(self) -> PendingRows:
        """The tokens for the next shard; from now on they are not pending."""
        pending, self.pending = self.pending, PendingRows()
        return pending

    def claim_epochs(self) -> dict[int, int]:
        """The epoch of the claim by response, for all held, ended and released responses."""
        return {**self.ended, **self.released, **{response: held.epoch for response, held in self.held.items()}}

    def check(self) -> None:
        """Assert the invariants that are cheap to check."""
        held, waiting, in_flight, acting = (
            len(part) for part in (self.held, self.waiting, self.in_flight, self.acting)
        )
        assert held == waiting + in_flight + acting, (
            f"a held response has no state: {held}, {waiting} wait, {in_flight} decoded, {acting} acting"
        )
        assert self.forgotten.isdisjoint(self.in_flight), "a response in flight is to be aborted"
        assert self.state == "working" or not in_flight, f"{in_flight} responses are decoded without weights"

    def _stop_holding(self, responses: set[int]) -> None:
        for response in responses:
            del self.held[response]
        gone = responses & (self.in_flight | self.acting.keys())
        # An environment may keep what waits for the engine.
        self.forgotten |= responses if self.has_turns else gone
        self.in_flight -= gone
        for response in gone & self.acting.keys():
            del self.acting[response]
        if len(gone) < len(responses):
            self.waiting = deque(response for response in self.waiting if response not in responses)
