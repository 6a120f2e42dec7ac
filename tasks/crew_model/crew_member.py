"""A member of the crew in virtual time: it decodes its responses in lockstep, one token of each per step.

All running responses are at the same step, so one counter of tokens stands for all of them. A response that begins when
the counter is at V ends when the counter has grown by what the response has left. So nothing is done per token.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.crew_model.accounts import Account, Life
from tasks.crew_model.decode_rate import FLAT, STEPS_MIN
from tasks.crew_model.step_time import StepTime

_DONE_TOKENS = 1e-6


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """The abilities of a pool's engines, computed once."""

    responses_max: int
    prefill_tokens_per_s: float
    step_s: npt.NDArray[np.float64]
    tokens_per_s: tuple[float, ...]

    @classmethod
    def of(cls, step_time: StepTime, responses_max: int, prefill_tokens_per_s: float) -> "EngineModel":
        return cls._of(step_time.table(responses_max), prefill_tokens_per_s)

    @classmethod
    def standing_for(
        cls, each: float, step_time: StepTime, responses_max: int, prefill_tokens_per_s: float
    ) -> "EngineModel":
        """The engine in a model in which each response stands for `each` of those that the member decodes.

        A full engine decodes as many tokens per second as the member, although its places are a whole number.
        """
        places = max(1, round(responses_max / each))
        batch = np.clip(np.arange(places + 1) * responses_max / places, 1, responses_max)
        table = np.interp(batch, np.arange(responses_max + 1), step_time.table(responses_max))
        table *= places * each / responses_max
        table[0] = 0.0
        return cls._of(table, prefill_tokens_per_s / each)

    @classmethod
    def _of(cls, step_s: npt.NDArray[np.float64], prefill_tokens_per_s: float) -> "EngineModel":
        """step_s: seconds of a step by the number of responses, from 0 on."""
        return cls(
            responses_max=len(step_s) - 1,
            prefill_tokens_per_s=prefill_tokens_per_s,
            step_s=step_s,
            tokens_per_s=(1 / float(step_s[1]), *(1 / step_s[1:]).tolist()),
        )


class ModelMember:
    """One process life in a slot. `advance` brings its time up to date, before anything else is asked.

    state: "loading" until the weights are in place, then "working"; "gone" when it has left, "dead" when its machine
    was lost. acting: when the answers are there for which responses wait; such a response takes no place among those
    that are decoded. cached: those whose turn it has decoded and whose next one has not begun; the engine still has
    their tokens. journalled: the responses that it was decoding when it stopped; since then all that it holds is in
    `waiting`. asked: how many responses it has asked of which member, that has not answered yet. own: what it holds of
    its slot's first assignment. phase_s: offset of its flushes within the flush interval.
    """

    def __init__(
        self,
        name: str,
        slot: int,
        engine: EngineModel,
        account: Account,
        *,
        now_s: float,
        batch_max: int | None,
        weight: float,
        phase_s: float,
    ) -> None:
        self.name = name
        self.slot = slot
        self.engine = engine
        self.account = account
        self.life = Life(began_s=now_s, weight=weight)
        account.lives.append(self.life)
        self.state = "loading"
        self.ended_s = 0.0
        self.waiting: deque[int] = deque()
        self.running: dict[int, float] = {}
        self.acting: dict[int, float] = {}
        self.cached: set[int] = set()
        self.own: set[int] = set()
        self.journalled: set[int] = set()
        self.asked: dict[str, int] = {}
        self.version = 0
        self._batch_max = batch_max
        self._phase_s = phase_s
        self._tokens = 0.0
        self._now_s = now_s
        self._stalled_until_s = now_s
        # A dropped response stays in the heap until it reaches the front; an end counts only if it equals the one noted
        # here.
        self._ends: list[tuple[float, int]] = []
        self._end_of: dict[int, float] = {}
        self._groups: set[int] = set()
        # Steps by batch size, and the sizes that count as measured.
        self._steps: dict[int, float] = {}
        self._known: set[int] = set()
        self._plateau: int | None = 0

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.acting)

    @property
    def begun(self) -> set[int]:
        """What it holds of which it has decoded something."""
        return self.running.keys() | self.cached | self.journalled

    @property
    def alive(self) -> bool:
        return self.state in ("loading", "working")

    @property
    def set_apart(self) -> bool:
        """Whether the plan gave it a small batch."""
        return self._batch_max is not None

    @property
    def isolated(self) -> bool:
        """Whether its batch must stay small, because some of its first assignment is left."""
        return self.set_apart and bool(self.own)

    @property
    def batch_limit(self) -> int:
        """The most responses it decodes at once."""
        most = self.engine.responses_max
        return min(self._batch_max, most) if self._batch_max is not None and self.own else most

    @property
    def room(self) -> int:
        """How many more responses it could begin now; 0 while some of its own still wait."""
        return 0 if self.waiting else max(0, self.batch_limit - len(self.running))

    def work(self, now_s: float) -> None:
        """The weights are in place: decoding may begin."""
        self.state = "working"
        self.life.worked_s = self._now_s = self._stalled_until_s = now_s

    def advance(self, now_s: float) -> None:
        """Let time pass: first the rest of prefill, then decoding, or idling."""
        passed_s = now_s - self._now_s
        if self.state != "working" or passed_s <= 0:
            return
        prefill_s = min(passed_s, max(0.0, self._stalled_until_s - self._now_s))
        self._now_s = now_s
        self.account.add("prefill", prefill_s * self.life.weight)
        rest_s = passed_s - prefill_s
        if self.running:
            steps = rest_s / float(self.engine.step_s[len(self.running)])
            self._tokens += steps
            self._note_steps(len(self.running), steps)
            self.life.decode_s += rest_s * self.life.weight
        else:
            self.account.add("idle", rest_s * self.life.weight)

    def _note_steps(self, batch: int, steps: float) -> None:
        if batch in self._known:
            return
        self._steps[batch] = self._steps.get(batch, 0.0) + steps
        if self._steps[batch] >= STEPS_MIN:
            self._known.add(batch)
            self._plateau = None

    @property
    def plateau(self) -> int:
        """The plateau as the member has measured it (tasks/crew_model/decode_rate.py); 0: not yet."""
        if self._plateau is None:
            self._plateau = 0
            if max(self._known) >= 2 * min(self._known):
                rates = {batch: batch / float(self.engine.step_s[batch]) for batch in self._known}
                enough = FLAT * max(rates.values())
                self._plateau = min(batch for batch, rate in rates.items() if rate >= enough)
        return self._plateau

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """Tokens per second of one response by the number decoded together; empty until anything was measured."""
        return self.engine.tokens_per_s if self._known else ()

    def start(self, response: int, tokens_left: float, group: int, prompt_tokens: int, prefix_tokens: float) -> None:
        """Prefill the prompt, unless another response of the group has done so, and the prefix; then decode.

        tokens_left: until the response or its turn ends.
        """
        prefill = prefix_tokens + (0 if group in self._groups else prompt_tokens)
        self._groups.add(group)
        self.cached.discard(response)
        self.life.prefill_tokens += prefill
        self._stalled_until_s = max(self._now_s, self._stalled_until_s) + prefill / self.engine.prefill_tokens_per_s
        self.running[response] = self._tokens
        self._end_of[response] = self._tokens + tokens_left
        heapq.heappush(self._ends, (self._end_of[response], response))

    def next_end_s(self) -> float | None:
        """When the next response will end if nothing changes; None if none is running."""
        while self._ends and self._end_of.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        decode_s = max(0.0, self._ends[0][0] - self._tokens) * float(self.engine.step_s[len(self.running)])
        return max(self._now_s, self._stalled_until_s) + decode_s

    def wait_for_answer(self, response: int, until_s: float) -> None:
        """Hold a response that waits for a tool, without a place among those that are decoded."""
        self.acting[response] = until_s

    def answered(self, response: int) -> None:
        """The answer is there: the response goes on as soon as there is a place, before those that wait already."""
        del self.acting[response]
        self.waiting.appendleft(response)

    def ended(self) -> list[int]:
        """Responses that have decoded what they were started for; they stop running."""
        found: list[int] = []
        if not self.running:
            return found
        # Late in a long time, the clock's resolution is more than the last tokens of a quick engine take.
        unseen = 4 * math.ulp(self._now_s) / float(self.engine.step_s[len(self.running)])
        while self._ends and self._ends[0][0] <= self._tokens + max(_DONE_TOKENS, unseen):
            end, response = heapq.heappop(self._ends)
            if self._end_of.get(response) == end:
                del self.running[response], self._end_of[response]
                found.append(response)
        return found

    def flushed(self, response: int, flush_interval_s: float) -> tuple[float, float]:
        """(tokens of a running response that are journalled, tokens since), both decoded in this life."""
        decoded = self._tokens - self.running[response]
        since_s = (self._now_s - self._phase_s) % flush_interval_s
        lost = min(decoded, since_s / float(self.engine.step_s[len(self.running)]))
        return decoded - lost, lost

    def decoded(self, response: int) -> float:
        """Tokens of a running response that were decoded in this life."""
        return self._tokens - self.running[response]

    def stop(self, state: str, now_s: float) -> None:
        """End the member, dead or gone; what it had begun comes before what it had not."""
        self.state, self.life.ended_s, self.ended_s = state, now_s, now_s
        self.version += 1
        self.journalled = set(self.running)
        self.waiting.extendleft(sorted(self.running.keys() | self.acting.keys(), reverse=True))
        self.running.clear()
        self.acting.clear()
        self._end_of.clear()

    def drop(self, responses: Sequence[int]) -> None:
        """Give up responses that another member has taken. The heap forgets them later."""
        taken = set(responses)
        self.own -= taken
        self.journalled -= taken
        self.cached -= taken
        for response in taken & self.running.keys():
            del self.running[response], self._end_of[response]
        if not taken.isdisjoint(self.waiting):
            self.waiting = deque(response for response in self.waiting if response not in taken)
