"""A member of the crew in virtual time: decodes its responses in lockstep, one token of each per step.

A single counter of steps serves all running responses: a response with n tokens left that begins at counter V ends at
counter V + n. The model therefore does no work per token.
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
    """The abilities of a pool's engines, computed once.

    Attributes:
        responses_max: The most responses decoded together.
        prefill_tokens_per_s: Tokens prefilled per second.
        step_s: Seconds of a step by the number of responses, [responses_max + 1], from 0 on.
        tokens_per_s: Tokens per second of a single response by the number of responses, from 0 (meaningless) on.
    """

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
        """The engine in a reduced model, in which each response stands for `each` responses of the member.

        A full reduced engine decodes as many tokens per second as the member, although its places are a whole number.
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
    """One process life in a slot. Call `advance` to bring the member's time up to date before any question.

    Attributes:
        name: The incarnation.
        slot: The number of the slot.
        engine: The abilities of the engine.
        account: The account of the pool.
        life: The seconds and tokens of the process.
        state: "loading" until the weights are in place, then "working"; "gone" after leaving, "dead" after the loss of
            the machine.
        ended_s: The time of "gone" or "dead".
        waiting: Held responses that wait for a place, in order; after the end, all held responses.
        running: For each decoded response, the counter of steps at its start.
        acting: For each response that waits for a tool, the time of the answer. The response takes no place in the
            batch.
        cached: Responses with a decoded turn whose next turn has not begun; the engine still has the tokens.
        own: Held responses of the slot's first assignment.
        journalled: The responses that the member was decoding at its end.
        open_asks: The number of responses asked of a holder without an answer yet, by the holder's name.
        version: Grows whenever the next end of a response may change.
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
        self.open_asks: dict[str, int] = {}
        self.version = 0
        self._batch_max = batch_max
        self._phase_s = phase_s
        self._tokens = 0.0
        self._now_s = now_s
        self._stalled_until_s = now_s
        # A dropped response stays in the heap until the front; an end counts only if equal to the end in `_end_of`.
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
        """Held responses with at least one decoded token in the engine or the journal."""
        return self.running.keys() | self.cached | self.journalled

    @property
    def alive(self) -> bool:
        return self.state in ("loading", "working")

    @property
    def set_apart(self) -> bool:
        """Whether the plan gave the member a small batch."""
        return self._batch_max is not None

    @property
    def isolated(self) -> bool:
        """Whether the batch must stay small, because responses of the first assignment are left."""
        return self.set_apart and bool(self.own)

    @property
    def batch_limit(self) -> int:
        """The most responses that the member decodes at once."""
        most = self.engine.responses_max
        return min(self._batch_max, most) if self._batch_max is not None and self.own else most

    @property
    def room(self) -> int:
        """The number of further responses that the member could begin now; 0 while held responses wait."""
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
        """The plateau by the member's measurements (tasks/crew_model/decode_rate.py); 0: not measured yet."""
        if self._plateau is None:
            self._plateau = 0
            if max(self._known) >= 2 * min(self._known):
                rates = {batch: batch / float(self.engine.step_s[batch]) for batch in self._known}
                enough = FLAT * max(rates.values())
                self._plateau = min(batch for batch, rate in rates.items() if rate >= enough)
        return self._plateau

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """Tokens per second of a single response by batch size; empty until a batch size is measured."""
        return self.engine.tokens_per_s if self._known else ()

    def start(self, response: int, tokens_left: float, group: int, prompt_tokens: int, prefix_tokens: float) -> None:
        """Prefill the prompt, unless the engine has the group's prompt, and the prefix; then decode.

        tokens_left: tokens until the response or its turn ends.
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
        """When the next response will end without further changes; None if no response is running."""
        while self._ends and self._end_of.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        decode_s = max(0.0, self._ends[0][0] - self._tokens) * float(self.engine.step_s[len(self.running)])
        return max(self._now_s, self._stalled_until_s) + decode_s

    def wait_for_answer(self, response: int, until_s: float) -> None:
        """Hold a response that waits for a tool, without a place in the batch."""
        self.acting[response] = until_s

    def answered(self, response: int) -> None:
        """The answer has come: the response goes on at the next free place, ahead of all waiting responses."""
        del self.acting[response]
        self.waiting.appendleft(response)

    def ended(self) -> list[int]:
        """Stop and return the responses that have decoded the tokens given to `start`."""
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
        """(journalled tokens, tokens since the last flush) of a running response, both decoded in this life."""
        decoded = self._tokens - self.running[response]
        since_s = (self._now_s - self._phase_s) % flush_interval_s
        lost = min(decoded, since_s / float(self.engine.step_s[len(self.running)]))
        return decoded - lost, lost

    def decoded(self, response: int) -> float:
        """Tokens of a running response, decoded in this life."""
        return self._tokens - self.running[response]

    def stop(self, state: str, now_s: float) -> None:
        """End the member, dead or gone; begun responses come first in `waiting`."""
        self.state, self.life.ended_s, self.ended_s = state, now_s, now_s
        self.version += 1
        self.journalled = set(self.running)
        self.waiting.extendleft(sorted(self.running.keys() | self.acting.keys(), reverse=True))
        self.running.clear()
        self.acting.clear()
        self._end_of.clear()

    def drop(self, responses: Sequence[int]) -> None:
        """Give up responses to a new holder. The heap of ends forgets the responses later."""
        taken = set(responses)
        self.own -= taken
        self.journalled -= taken
        self.cached -= taken
        for response in taken & self.running.keys():
            del self.running[response], self._end_of[response]
        if not taken.isdisjoint(self.waiting):
            self.waiting = deque(response for response in self.waiting if response not in taken)
