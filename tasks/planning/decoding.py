"""When each response of an iteration ends, if parts of a crew decode them: members that come and go together.

Every running response of a part gets one token per step, so each part needs one counter of tokens, and nothing is done
per token. While `a` responses run on the `m` members of a part, a step takes as long as that of one member with a / m
responses, as if all members were evenly full (the identity of tasks/planning/makespan.py).

The rules are those of members (tasks/crew_model/rebalance.py). When a part comes or goes, what waits, and what that
part leaves behind, is shared by all that have room. When a response ends, its part takes the next one that waits. A
part that has run empty takes running responses of the fullest part, if that one decodes as fast without them or the
helpers decode them much faster.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.crew_model.rebalance import LATE_RATIO
from tasks.crew_model.step_time import StepTime

_DONE_TOKENS = 1e-9


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """Members that are alike and decode from start_s to end_s.

    count: how many are expected to be there. prefill_tokens_per_s: how fast one computes the tokens that a response
    already has when it takes it over; it decodes nothing meanwhile.
    """

    count: float
    step_time: StepTime
    responses_max: int
    prefill_tokens_per_s: float
    start_s: float
    end_s: float
    is_crew: bool


# How many times as long the member of these parts that ends last decodes as if all were evenly full.
Unevenness = Callable[[Sequence[Part]], float]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """ends_s: when each response has ended, in the order as given.

    busy_s: member-seconds of the crew, from the start of each part until the last response ends; if members leave, each
    until it has no work. kept_by: the part that has decoded the response, if no response of any part has waited or
    moved by then, so that all members still have what they were dealt; else None.
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

    room: how many of the given responses, each of which stands for `weight`, it decodes together. tokens: those that
    each has got if it has run from the start. running: (tokens at which it ends, response), a heap. next_s: when the
    next of them ends if nothing changes. busy_s: member-seconds.
    """

    def __init__(self, part: Part, lengths: Sequence[float], weight: float, *, leaves: bool) -> None:
        self.part = part
        self._lengths = lengths
        self.room = max(1.0, part.count * part.responses_max / weight)
        self.tokens = self.busy_s = 0.0
        self.now_s = part.start_s
        self.next_s = math.inf
        self.running: list[tuple[float, int]] = []
        self._each = weight / part.count
        asked = np.maximum(1.0, np.arange(len(lengths) + 1) * self._each)
        batch = np.minimum(asked, part.responses_max)
        step_s = np.interp(batch, np.arange(part.responses_max + 1), part.step_time.table(part.responses_max))
        # By the number that run. One that stands for more responses than have room takes the time of all of them.
        self._steps_s: list[float] = (step_s * asked / batch).tolist()
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
        """Let time pass until now_s, before which no response ends. While the part prefills, its own now_s is later."""
        passed_s = max(0.0, now_s - self.now_s)
        self.now_s += passed_s
        self.tokens += passed_s / self._step_s
        there = len(self.running) / max(1, self._most) if self._leaves else 1.0
        self.busy_s += passed_s * there * self.part.count

    def schedule(self) -> None:
        """Note when the next response ends."""
        running = len(self.running)
        self._most = max(self._most, running)
        self._step_s = self.next_s = math.inf
        if running:
            self._step_s = self._steps_s[self._most if self._leaves else running]
            self.next_s = self.now_s + max(0.0, self.running[0][0] - self.tokens) * self._step_s

    def ends_s(self) -> npt.NDArray[np.float64]:
        """When each running response ends, the next one first, if none begins meanwhile; call `schedule` before."""
        self.running.sort()
        running = len(self.running)
        steps_s = [self._step_s] * running if self._leaves else self._steps_s[running:0:-1]
        until = np.maximum(self.tokens, [tokens for tokens, _ in self.running])
        ends: npt.NDArray[np.float64] = self.now_s + np.cumsum(np.diff(until, prepend=self.tokens) * steps_s)
        return ends

    def end_first(self, ends_s: Sequence[float]) -> list[int]:
        """End one response at each of these times, the first of `ends_s`, and return them; none begins meanwhile."""
        running, count = len(self.running), len(ends_s)
        passed_s = np.diff(ends_s, prepend=self.now_s)
        there = np.arange(running, running - count, -1) / self._most if self._leaves else np.ones(count)
        self.busy_s += float(passed_s @ there) * self.part.count
        self.now_s, self.tokens = ends_s[-1], max(self.tokens, self.running[count - 1][0])
        ended = [response for _, response in self.running[:count]]
        del self.running[:count]
        self.schedule()
        return ended

    def begin(self, tokens: float, response: int) -> None:
        """Run a response that has so many tokens left; those that it has already are prefilled first."""
        heapq.heappush(self.running, (self.tokens + tokens, response))
        self._prefill(self._lengths[response] - tokens)

    def fill(self, waiting: deque[tuple[float, int]]) -> None:
        """Begin the first of these (tokens left, response), as many as have room."""
        count = min(len(waiting), max(0, math.ceil(self.room - len(self.running))))
        begun = [waiting.popleft() for _ in range(count)]
        self.running += [(self.tokens + tokens, response) for tokens, response in begun]
        heapq.heapify(self.running)
        self._prefill(sum(self._lengths[response] - tokens for tokens, response in begun))

    def _prefill(self, tokens: float) -> None:
        passed_s = tokens * self._each / self.part.prefill_tokens_per_s
        self.now_s += passed_s
        self.busy_s += passed_s * self.part.count

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

    def spare(self, helper: StepTime) -> float:
        """How many running responses a member that has none, with these step times, takes from one of this part."""
        batch, plateau = self.batch, self.part.step_time.plateau(self.part.responses_max)
        if plateau < batch:
            return min(batch - plateau, batch / 2)
        moved = (batch + 1) / 2
        here_s, there_s = self.part.step_time.step_s(max(1, round(batch))), helper.step_s(max(1, round(moved)))
        return moved if there_s < LATE_RATIO * here_s else 0.0


class _Decoding:
    def __init__(
        self, lengths: Sequence[float], parts: Sequence[Part], *, weight: float, unevenness: Unevenness, leaves: bool
    ) -> None:
        self._lengths = lengths
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
            if not self._waiting:
                self._run_on(times[0] if times else math.inf)
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

    def _run_on(self, until_s: float) -> None:
        """While nothing waits: end all that ends before until_s and before any part runs empty, at once."""
        ahead = [(clock, clock.ends_s()) for clock in self._clocks if clock.running]
        until_s = min(until_s, *(ends_s[-1] for _, ends_s in ahead)) if ahead else until_s
        for clock, ends_s in ahead:
            if before := ends_s[ends_s < until_s].tolist():
                for end_s, response in zip(before, clock.end_first(before), strict=True):
                    self._note_end(clock, response, end_s)

    def _note_end(self, clock: _Clock, response: int, now_s: float) -> None:
        self._ends_s[response] = now_s
        self._left -= 1
        if self._keeps:
            self._kept_by[response] = clock.part

    def _end(self, clock: _Clock, now_s: float) -> None:
        """Responses of this clock end, and others begin in their place."""
        for response in clock.end(now_s):
            self._note_end(clock, response, now_s)
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
        dealt = [clock.part for clock in self._clocks if clock.running]
        left = [each for clock in stopped for each in self._left_by(clock, dealt)]
        self._keeps = self._keeps and not left
        # What was begun first goes on first.
        self._waiting.extendleft(sorted(left, key=lambda each: each[1], reverse=True))
        self._stopped += stopped
        self._clocks = [clock for clock in self._clocks if clock.part.end_s > now_s]
        come = [part for part in self._parts if part.start_s == now_s < part.end_s]
        self._clocks += [_Clock(part, self._lengths, self._weight, leaves=self._leaves) for part in come]
        self._begin_waiting()
        self._keeps = self._keeps and not self._waiting
        for clock in self._clocks:
            if not clock.running:
                self._help(clock)
        for clock in self._clocks:
            clock.schedule()

    def _begin_waiting(self) -> None:
        """Begin what waits, each response in the part whose members are emptiest."""
        free = [(clock.batch, place) for place, clock in enumerate(self._clocks) if clock.has_room]
        heapq.heapify(free)
        while self._waiting and len(free) > 1:
            clock = self._clocks[free[0][1]]
            clock.begin(*self._waiting.popleft())
            if clock.has_room:
                heapq.heapreplace(free, (clock.batch, free[0][1]))
            else:
                heapq.heappop(free)
        for _, place in free:
            self._clocks[place].fill(self._waiting)

    def _left_by(self, clock: _Clock, dealt: Sequence[Part]) -> list[tuple[float, int]]:
        """(tokens left, response) of what a part leaves behind; its last member has decoded less.

        dealt: the parts that have had responses from the beginning.
        """
        left, count = clock.give(len(clock.running)), clock.part.count
        if not self._keeps or count < 2:
            return left
        more = clock.tokens * (1 - 1 / self._unevenness(dealt))
        of_others = len(left) - round(len(left) / count)
        return [(tokens + more * (place >= of_others), response) for place, (tokens, response) in enumerate(left)]

    def _help(self, clock: _Clock) -> None:
        """Let a part that has run empty take running responses of the fullest part that can spare some."""
        others = [other for other in self._clocks if other.running and other.spare(clock.part.step_time) >= 1]
        if self._leaves or not others:
            return
        fullest = max(others, key=lambda other: other.batch)
        pairs = min(clock.part.count, fullest.part.count)
        if count := min(int(clock.room), int(pairs * fullest.spare(clock.part.step_time) / self._weight)):
            fullest.advance(clock.now_s)
            for given in fullest.give(count):
                clock.begin(*given)
            fullest.schedule()
            self._keeps = False
