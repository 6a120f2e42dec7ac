"""Holdings: the responses that an incarnation holds, and the state of each.

Only the decode loop's thread changes them. The housekeeping thread reads them, and copies a collection before it
iterates.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from tasks.sampling.session.claimant import Work


@dataclass(slots=True)
class Held:
    """A response to extend: the epoch of its claim, and its tokens so far, journalled or not."""

    epoch: int
    token_ids: list[int]


@dataclass(slots=True)
class Holdings:
    """The responses of an incarnation by state: each one in `held` is either in `waiting` or in `in_flight`.

    `held` is in the order of taking. `released` and `ended` give the epoch of the claim under which that happened.
    own: the responses that the plan gives to the slot. batch_max: the plan's limit on how many the member decodes
    together while it holds any of `own`.
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
        """Whether the plan's batch_max applies: the member still holds a response that the plan gave to its slot."""
        return self.batch_max is not None and not self.own.isdisjoint(list(self.held))

    def batch_limit(self, engine_max: int) -> int:
        """The most responses to decode together now, on an engine that can decode `engine_max`."""
        return min(self.batch_max or engine_max, engine_max) if self.is_isolated else engine_max

    def take(self, work: Work) -> None:
        self.held[work.response] = Held(work.epoch, list(work.prefix))
        self.released.pop(work.response, None)
        self.waiting.append(work.response)

    def begin_again(self) -> None:
        """Note that the engine lost everything: it needs weights, and all held responses wait in order of taking."""
        self.state = "loading"
        self.waiting = deque(self.held)
        self.in_flight.clear()

    def end(self, response: int) -> None:
        self.ended[response] = self.held[response].epoch
        self.ends += 1
        self.in_flight.discard(response)
        del self.held[response]

    def release(self, response: int) -> None:
        # Added to `released` first: housekeeping may look in between and must find the response in one of the two.
        self.released[response] = self.held[response].epoch
        self.let_go([response])

    def let_go(self, responses: Collection[int]) -> None:
        """Stop holding these responses."""
        for response in responses:
            del self.held[response]
        self.in_flight.difference_update(responses)
        self.waiting = deque(response for response in self.waiting if response not in responses)

    def known(self) -> dict[int, int]:
        """Every response that is held, or was until it ended or was released, with the epoch of its claim."""
        held = {response: held.epoch for response, held in list(self.held.items())}
        return {**self.ended, **self.released, **held}
