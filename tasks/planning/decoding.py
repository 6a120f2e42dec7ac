"""When each response of an iteration ends, if parts of a crew decode them: members that come and go together.

Each part has a clock that counts tokens: all that it runs get one token per step, so nothing is done per token. While
`a` responses run on its `m` members, a step takes tau(a / m) seconds, which is TailSieve's identity
(tasks/planning/makespan.py) for members that are evenly full. The rules are those of members
(tasks/planning/rebalance.py). When a part comes or goes, what waits, and what that part leaves behind, is shared by all
that have room. When a response ends, its part takes the next one that waits. What runs stays with its part, unless the
members of that part are so full that they decode no sooner for it.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.planning.rebalance import LATE_RATIO
from tasks.planning.step_time import StepTime

_DONE_TOKENS = 1e-9


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """Members that are alike and decode from start_s to end_s; count: how many are expected to be there."""

    count: float
    step_time: StepTime
    responses_max: int
    start_s: float
    end_s: float
    is_crew: bool


# How many times as long the last member of these parts takes as if all were evenly full.
Unevenness = Callable[[Sequence[Part]], float]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """ends_s: when each response has ended, in the order as given. busy_s: member-seconds of the crew's decoding.

    kept_by: the part that has decoded the response from its first to its last token, if no response has waited or moved
    by then; else None. So members of that part still have what they were dealt.
    """

    ends_s: list[float]
    kept_by: list[Part | None]
    busy_s: float


def decoded(
    lengths: Sequence[float], parts: Sequence[Part], *, weight: float, unevenness: Unevenness, leaves: bool
) -> Decoded:
    """Decode responses of these lengths (tokens), in the order in which they begin.

    weight: how many responses each of them stands for. unevenness is used where a part stops before anything has moved:
    its last member has got so many times fewer tokens. leaves: members without work leave, and the others keep what
    they were dealt, so that their batches stay full; then they are taken to be evenly full. Raises ValueError if all
    parts end before the responses.
    """
    return _Decoding(lengths, parts, weight=weight, unevenness=unevenness, leaves=leaves).run()


class _Clock:
    """A part and the responses that it runs.

    tokens: those that each response has got if it has run from the start. running: (tokens at which it ends, response),
    a heap. next_s: when the next of them ends if nothing changes. busy_s: member-seconds. helps: whether it has taken
    running responses.
    """

    def __init__(self, part: Part, weight: float, *, leaves: bool) -> None:
        self.part = part
        self.room = max(1.0, part.count * part.responses_max / weight)
        self.tokens = self.busy_s = 0.0
        self.now_s = part.start_s
        self.next_s = math.inf
        self.running: list[tuple[float, int]] = []
        self.helps = False
        self._each = weight / part.count
        self._table = part.step_time.table(part.responses_max).tolist()
        self._step_s = math.inf
        self._leaves = leaves
        # The most that it has run.
        self._most = 0

    @property
    def batch(self) -> float:
        """Responses that each member decodes."""
        return len(self.running) * self._each

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.room

    def advance(self, now_s: float) -> None:
        """Let time pass until now_s, before which no response ends."""
        passed_s = now_s - self.now_s
        self.now_s = now_s
        self.tokens += passed_s / self._step_s
        there = len(self.running) / max(1, self._most) if self._leaves else 1.0
        self.busy_s += passed_s * there * self.part.count

    def schedule(self) -> None:
        """Note when the next response ends."""
        running = len(self.running)
        self._most = max(self._most, running)
        self._step_s = self.next_s = math.inf
        if not running:
            return
        asked = max(1.0, (self._most if self._leaves else running) * self._each)
        batch = min(asked, self.part.responses_max)
        below = int(batch)
        self._step_s = self._table[below]
        if batch > below:
            self._step_s += (batch - below) * (self._table[below + 1] - self._table[below])
        # One that stands for more responses than have room takes the time of all of them.
        self._step_s *= asked / batch
        self.next_s = self.now_s + max(0.0, self.running[0][0] - self.tokens) * self._step_s

    def begin(self, tokens: float, response: int) -> None:
        """Run a response that has so many tokens left."""
        heapq.heappush(self.running, (self.tokens + tokens, response))

    def end(self, now_s: float) -> list[int]:
        """The responses that end now."""
        self.advance(now_s)
        self.tokens = max(self.tokens, self.running[0][0])
        ended = []
        while self.running and self.running[0][0] <= self.tokens + _DONE_TOKENS:
            ended.append(heapq.heappop(self.running)[1])
        return ended

    def give(self, count: int) -> list[tuple[float, int]]:
        """Stop `count` responses, taken evenly from short to long, because it is not known which are long.

        Returns (tokens left, response) of each, the shortest first.
        """
        ordered = sorted(self.running)
        given = {place * len(ordered) // count for place in range(count)}
        self.running = [each for place, each in enumerate(ordered) if place not in given]
        return [(ordered[place][0] - self.tokens, ordered[place][1]) for place in sorted(given)]

    def spare(self) -> float:
        """How many running responses one member without any takes from one of these."""
        step_s, batch = self.part.step_time.step_s, self.batch
        plateau = self.part.step_time.plateau(self.part.responses_max)
        if plateau < batch:
            return min(batch - plateau, batch / 2)
        is_late = batch >= 2 and step_s(round(batch)) * LATE_RATIO > step_s(round(batch / 2))
        return batch / 2 if is_late else 0.0


class _Decoding:
    def __init__(
        self, lengths: Sequence[float], parts: Sequence[Part], *, weight: float, unevenness: Unevenness, leaves: bool
    ) -> None:
        self._parts = parts
        self._weight = weight
        self._unevenness = unevenness
        self._leaves = leaves
        self._waiting = deque((length, response) for response, length in enumerate(lengths))
        self._ends_s = [0.0] * len(lengths)
        self._left = len(lengths)
        self._kept_by: list[Part | None] = [None] * len(lengths)
        # Whether no response has waited or moved.
        self._keeps = not leaves
        self._clocks: list[_Clock] = []
        self._stopped: list[_Clock] = []

    def run(self) -> Decoded:
        parts = self._parts
        times = deque(sorted({part.start_s for part in parts} | {part.end_s for part in parts}))
        while self._left:
            clock = min(self._clocks, key=lambda one: one.next_s, default=None)
            next_s = math.inf if clock is None else clock.next_s
            if times and times[0] < next_s:
                self._change(times.popleft())
            elif clock is None or next_s == math.inf:
                raise ValueError(f"parts: all {len(parts)} end before the responses; allowed: one that does not")
            else:
                self._end(clock, next_s)
        for clock in self._clocks:
            clock.advance(max(self._ends_s))
        busy_s = sum(clock.busy_s for clock in (*self._clocks, *self._stopped) if clock.part.is_crew)
        return Decoded(ends_s=self._ends_s, kept_by=self._kept_by, busy_s=busy_s)

    def _end(self, clock: _Clock, now_s: float) -> None:
        """Responses of this clock end, and others begin in their place."""
        for response in clock.end(now_s):
            self._ends_s[response] = now_s
            self._left -= 1
            if self._keeps and not clock.helps:
                self._kept_by[response] = clock.part
        while self._waiting and clock.has_room:
            self._keeps = False
            clock.begin(*self._waiting.popleft())
        if not clock.running:
            self._help(clock)
        clock.schedule()

    def _change(self, now_s: float) -> None:
        """Parts come and go."""
        for clock in self._clocks:
            clock.advance(now_s)
        stopped = [clock for clock in self._clocks if clock.part.end_s <= now_s]
        left = [each for clock in stopped for each in self._left_by(clock)]
        self._keeps = self._keeps and not left
        # What was begun first goes on first.
        self._waiting.extendleft(sorted(left, key=lambda each: each[1], reverse=True))
        self._stopped += stopped
        self._clocks = [clock for clock in self._clocks if clock.part.end_s > now_s]
        come = [part for part in self._parts if part.start_s == now_s < part.end_s]
        self._clocks += [_Clock(part, self._weight, leaves=self._leaves) for part in come]
        while self._waiting and (free := [clock for clock in self._clocks if clock.has_room]):
            min(free, key=lambda one: one.batch).begin(*self._waiting.popleft())
        self._keeps = self._keeps and not self._waiting
        for clock in self._clocks:
            if not clock.running:
                self._help(clock)
        for clock in self._clocks:
            clock.schedule()

    def _left_by(self, clock: _Clock) -> list[tuple[float, int]]:
        """(tokens left, response) of what a part leaves behind; its last member has decoded less."""
        left, count = clock.give(len(clock.running)), clock.part.count
        if not self._keeps or count < 2:
            return left
        dealt = [one.part for one in self._clocks if one is clock or (one.running and not one.helps)]
        more = clock.tokens * (1 - 1 / self._unevenness(dealt))
        of_others = len(left) - round(len(left) / count)
        return [(tokens + more * (place >= of_others), response) for place, (tokens, response) in enumerate(left)]

    def _help(self, clock: _Clock) -> None:
        """Let a clock without work take running responses that their holders decode no sooner."""
        others = [other for other in self._clocks if other.running and other.spare() >= 1]
        if self._leaves or not others:
            return
        fullest = max(others, key=lambda other: other.batch)
        pairs = min(clock.part.count, fullest.part.count)
        if count := min(int(clock.room), int(pairs * fullest.spare() / self._weight)):
            fullest.advance(clock.now_s)
            for given in fullest.give(count):
                clock.begin(*given)
            fullest.schedule()
            clock.helps = True
