"""Holdings: the responses that an incarnation holds, the state of each, and its tokens that are in no shard yet."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from storage.journal import PendingRows
from storage.shard import Finish
from tasks.sampling.engines.engine import FinishReason, TokenDelta
from tasks.sampling.session.actions import Work

FINISH = {FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}


@dataclass(slots=True)
class Held:
    """A response to extend: the epoch of its claim, and its tokens so far, journalled or not."""

    epoch: int
    token_ids: list[int]


@dataclass(slots=True)
class Holdings:
    """The responses of an incarnation by state: each one in `held` is either in `waiting` or in `in_flight`.

    `held` is in the order of taking. `released` and `ended` give the epoch of the claim under which that happened.
    forgotten: responses that the engine still decodes although they are not to be extended; their tokens are ignored
    until it has aborted them. ends: how many responses have ended, each time counted if one was claimed again.
    own: the responses that the plan gives to the slot. batch_max: the plan's limit on how many the member decodes
    together while it holds any of `own`.
    """

    own: frozenset[int] = frozenset()
    batch_max: int | None = None

    state: Literal["loading", "working", "gone"] = "loading"
    held: dict[int, Held] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    in_flight: set[int] = field(default_factory=set)
    forgotten: set[int] = field(default_factory=set)
    released: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    pending: PendingRows = field(default_factory=PendingRows)
    ends: int = 0
    generated: int = 0

    @property
    def is_isolated(self) -> bool:
        """Whether the plan's batch_max applies: the member still holds a response that the plan gave to its slot."""
        return self.batch_max is not None and not self.own.isdisjoint(self.held)

    def batch_limit(self, engine_max: int) -> int:
        """The most responses to decode together now, on an engine that can decode `engine_max`."""
        return min(self.batch_max or engine_max, engine_max) if self.is_isolated else engine_max

    def take(self, work: Work) -> None:
        """Hold a response; if it is held under an earlier claim, it begins again from the tokens of the new one."""
        if work.response in self.held:
            self.let_go({work.response})
        self.held[work.response] = Held(work.epoch, list(work.prefix))
        self.released.pop(work.response, None)
        self.waiting.append(work.response)

    def admit(self, engine_max: int) -> list[int]:
        """Move the first waiting responses into flight, as many as there is room for; returns them."""
        room = self.batch_limit(engine_max) - len(self.in_flight)
        responses = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
        self.in_flight.update(responses)
        return responses

    def begin_again(self) -> None:
        """Note that the engine lost everything: it needs weights, and all held responses wait in order of taking."""
        self.state = "loading"
        self.waiting = deque(self.held)
        self.in_flight.clear()
        self.forgotten.clear()

    def stop_decoding(self) -> None:
        """Note that nothing is decoded any more; what was in flight is to be aborted and waits."""
        self.forgotten |= self.in_flight
        self.in_flight.clear()
        self.waiting = deque(self.held)

    def record(self, delta: TokenDelta) -> None:
        """Keep what the engine returned for a response, unless it is no longer to be extended.

        It runs once for every token of every response, and an enum's hash and properties are slow, so a response that
        has not ended looks nothing up.
        """
        response, reason = delta.response, delta.finish_reason
        if response not in self.in_flight:
            return
        held, new = self.held[response], delta.token_ids
        known = held.token_ids
        finish = Finish.RUNNING if reason is None else FINISH[reason]
        self.pending.append(response, held.epoch, len(known), new, delta.logprobs, finish)
        known += new
        self.generated += len(new)
        if reason is not None:
            self.ended[response] = held.epoch
            self.ends += 1
            self.in_flight.remove(response)
            del self.held[response]

    def release(self, responses: Collection[int]) -> None:
        """Free responses for other members, once their tokens are journalled."""
        for response in responses:
            held = self.held[response]
            self.pending.append(response, held.epoch, len(held.token_ids), (), (), Finish.RELEASED)
            self.released[response] = held.epoch
        self._stop_holding(set(responses))

    def see(self, owned: dict[int, int]) -> int:
        """Let go of what another member has claimed, by the epochs of this one's claims; returns how many were held."""
        for response in [r for r, epoch in self.released.items() if owned.get(r) != epoch]:
            del self.released[response]
        lost = {response for response, held in self.held.items() if owned.get(response) != held.epoch}
        self.let_go(lost)
        return len(lost)

    def let_go(self, responses: set[int]) -> None:
        """Stop holding these responses, and drop their pending tokens: they do not count."""
        self.pending.drop(responses)
        self._stop_holding(responses)

    def take_pending(self) -> PendingRows:
        """The tokens for the next shard; from now on they are not pending."""
        pending, self.pending = self.pending, PendingRows()
        return pending

    def known(self) -> dict[int, int]:
        """Every response that is held, or was until it ended or was released, with the epoch of its claim."""
        return {**self.ended, **self.released, **{response: held.epoch for response, held in self.held.items()}}

    def check(self) -> None:
        """Assert what always holds, as far as it is cheap to see."""
        held, waiting, in_flight = len(self.held), len(self.waiting), len(self.in_flight)
        assert held == waiting + in_flight, f"a held response has no state: {held}, {waiting} wait, {in_flight} decoded"
        assert self.forgotten.isdisjoint(self.in_flight), "a response in flight is to be aborted"
        assert self.state == "working" or not in_flight, f"{in_flight} responses are decoded without weights"

    def _stop_holding(self, responses: set[int]) -> None:
        for response in responses:
            del self.held[response]
        gone = self.in_flight.intersection(responses)
        self.forgotten |= gone
        self.in_flight -= gone
        if len(gone) < len(responses):
            self.waiting = deque(response for response in self.waiting if response not in responses)
