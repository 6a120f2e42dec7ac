"""Holdings: what an incarnation has in hand, response by response.

Changed by the decode loop's thread alone; read by the housekeeping thread, which copies before it looks closer.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from tasks.sampling.session.claimant import Work


@dataclass(slots=True)
class Held:
    """A response to extend: under which claim, and its tokens so far, journalled or not."""

    epoch: int
    token_ids: list[int]


@dataclass(slots=True)
class Holdings:
    """`waiting` and `in_flight` divide `held`, which is in the order of taking.

    `released` and `ended` name the claim under which it was that. own: what the plan gives to the slot; batch_max: most
    of it to be decoded together, as the plan says.
    """

    own: frozenset[int] = frozenset()
    batch_max: int | None = None

    state: Literal["loading", "working", "gone"] = "loading"
    held: dict[int, Held] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    in_flight: set[int] = field(default_factory=set)
    released: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    ends: int = 0
    generated: int = 0

    @property
    def is_isolated(self) -> bool:
        """Whether the batch is to stay as small as the plan says: something of its own unit is not finished."""
        return self.batch_max is not None and not self.own.isdisjoint(list(self.held))

    def batch_limit(self, engine_max: int) -> int:
        """Most responses to decode together now, on an engine that can decode `engine_max`."""
        return min(self.batch_max or engine_max, engine_max) if self.is_isolated else engine_max

    def take(self, work: Work) -> None:
        self.held[work.response] = Held(work.epoch, list(work.prefix))
        self.released.pop(work.response, None)
        self.waiting.append(work.response)

    def begin_again(self) -> None:
        """The engine knows nothing any more: weights are to be loaded, and what was in flight waits before the rest."""
        self.state = "loading"
        self.waiting = deque(self.held)
        self.in_flight.clear()

    def end(self, response: int) -> None:
        self.ended[response] = self.held[response].epoch
        self.ends += 1
        self.in_flight.discard(response)
        del self.held[response]

    def release(self, response: int) -> None:
        # First there, then not here: whoever looks in between must not think that it is nowhere.
        self.released[response] = self.held[response].epoch
        self.let_go([response])

    def let_go(self, responses: Collection[int]) -> None:
        """Hold these no longer."""
        for response in responses:
            del self.held[response]
        self.in_flight.difference_update(responses)
        self.waiting = deque(response for response in self.waiting if response not in responses)

    def known(self) -> dict[int, int]:
        """Every response that is or was in hand, with the epoch of its claim."""
        held = {response: held.epoch for response, held in list(self.held.items())}
        return {**self.ended, **self.released, **held}
