"""Windows: the requests that wait at one moment become the submitted prompts of one iteration.

A window has an iteration of its own, and the weights stay as they are from one to the next. A server that begins again
goes on with the window that its earlier life has planned: the prompt table names the request of each group.
"""

import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from storage.clock import Clock
from storage.records import layout, prompt_table
from storage.records.run import exists, holds_run, read_plan
from storage.stores.connect import connect
from tasks.external.groups import Group
from tasks.external.plans import WrongStep
from tasks.external.rollouts import Rollouts
from tasks.learning.journal_follower import GroupTimeout
from tasks.prompts.submitted import PROMPT, TOKENS

log = logging.getLogger(__name__)
# The column of a prompt with the name of its request.
REQUEST = "request"


@dataclass(frozen=True)
class Answer:
    """The groups of a request, ascending, and the time of their plan in seconds since 1970."""

    groups: tuple[Group, ...]
    created_s: int

    @classmethod
    def of(cls, groups: Sequence[Group], planned_at_s: float) -> "Answer":
        """The answer of groups in any order."""
        return cls(tuple(sorted(groups, key=lambda group: group.number)), int(planned_at_s))


@dataclass
class _Open:
    """A request that is not answered. prompt: to submit, `count` times; groups: those that have come."""

    prompt: dict[str, Any]
    count: int
    answer: "Future[Answer]" = field(default_factory=Future)
    groups: list[Group] = field(default_factory=list)


class Windows:
    """Takes requests from any thread; `serve`, in a thread of its own, plans them and hands out their responses."""

    def __init__(self, rollouts: Rollouts, clock: Clock, window_s: float) -> None:
        """window_s: seconds from the first request of a window to its plan, in which more may join.

        Raises WrongStep if another program has planned the iteration that is under way.
        """
        self._rollouts, self._clock, self._window_s = rollouts, clock, window_s
        self._store = connect(rollouts.url)
        self._changed, self._is_closed = threading.Condition(), False
        self._waiting: dict[str, _Open] = {}
        self._answers: dict[str, Future[Answer]] = {}
        self.step = rollouts.step
        self._resumed = self._resume()

    def answer(self, name: str) -> "Future[Answer] | None":
        """The answer to a request that waits, or whose window has not ended; other answers are in the run."""
        return self._answers.get(name)

    def ask(self, name: str, prompt: dict[str, Any], n: int, *, step: int | None = None) -> "Future[Answer] | None":
        """The answer to a request for n responses, which is generated once for any number of calls.

        prompt: as for `Rollouts.submit`, with its tokens. step: `self.step` from before the caller has looked for the
        request in the run; None is returned if a window has ended meanwhile, which may have been the request's.
        """
        with self._changed:
            if name not in self._answers:
                if step not in (None, self.step):
                    return None
                count = math.ceil(n / self._rollouts.config.run.num_generations)
                self._waiting[name] = opened = _Open(prompt | {REQUEST: name}, count)
                self._answers[name] = opened.answer
                self._changed.notify()
            return self._answers[name]

    def serve(self) -> None:
        """Plan and answer window after window, until `close`; raises what `Rollouts` raises."""
        if self._resumed:
            self._answer(self._resumed)
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
            self._clock.sleep(self._window_s)
            self._answer(self._taken())

    def close(self) -> None:
        """Let `serve` return when the window under way has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def end(self, error: BaseException) -> None:
        """Let every unanswered request fail."""
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(error)

    def _resume(self) -> dict[str, _Open]:
        """The requests of a window that an earlier life of the server has planned and not ended."""
        if not holds_run(self._store) or not exists(self._store, layout.plan(self.step)):
            return {}
        found: dict[str, _Open] = {}
        for row in prompt_table.read_prompts(self._store, read_plan(self._store, self.step)):
            if REQUEST not in row.columns:
                raise WrongStep(f"iteration {self.step}: its prompts are another program's, which has to end it first")
            name = str(row.columns[REQUEST])
            given = {PROMPT: row.prompt, TOKENS: list(row.token_ids), **row.columns}
            found.setdefault(name, _Open(given, 0)).count += 1
        self._answers |= {name: opened.answer for name, opened in found.items()}
        log.warning("iteration %d goes on, with the requests of an earlier life of the server", self.step)
        return found

    def _taken(self) -> dict[str, _Open]:
        """The requests of the next window: run.num_prompts_per_step prompts at most, or one request."""
        room, taken = self._rollouts.config.run.num_prompts_per_step, dict[str, _Open]()
        with self._changed:
            for name, opened in list(self._waiting.items()):
                if taken and opened.count > room:
                    break
                room -= opened.count
                taken[name] = self._waiting.pop(name)
        return taken

    def _answer(self, window: dict[str, _Open]) -> None:
        step, prompts = self.step, [each.prompt for each in window.values() for _ in range(each.count)]
        self._rollouts.submit(step, prompts)
        planned_at_s = read_plan(self._store, step).created_at_s
        while not self._generated(step, window, planned_at_s):
            pass
        self._rollouts.publish(None)
        ended = self._rollouts.step
        with self._changed:
            self.step = ended
            # A client that asks again reads the run, so that memory does not grow with answers.
            for name in window:
                del self._answers[name]

    def _generated(self, step: int, window: dict[str, _Open], planned_at_s: float) -> bool:
        """Hand out each answer when its last group has come; False if no member has generated for a long time."""
        for opened in window.values():
            opened.groups.clear()
        try:
            for group in self._rollouts.next(step):
                opened = window[str(group.columns[REQUEST])]
                opened.groups.append(group)
                if len(opened.groups) == opened.count and not opened.answer.done():
                    opened.answer.set_result(Answer.of(opened.groups, planned_at_s))
        except GroupTimeout as error:
            log.warning("no member generates; `gleaner join %s` starts one: %s", self._rollouts.url, error)
            return False
        return True
