"""Windows: the requests that wait at one moment become the submitted prompts of one iteration.

A window has an iteration of its own, and the weights stay as they are from one to the next. Windows overlap: the next
one is planned as soon as a member has no work, and a window is concluded when it and all ahead have ended. A server
that begins again goes on with the windows that its earlier life has planned: the prompt table names the request of each
group.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
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
from tasks.serving.idle_members import IdleMembers
from tasks.turns.chat_request import Refusal

log = logging.getLogger(__name__)
# The column of a prompt with the name of its request.
REQUEST = "request"
# Requests that wait at one time; each holds its prompt in memory.
WAITING_MAX = 4096


def check_room(number_waiting: int) -> None:
    """Raise Refusal if no further request may wait."""
    if number_waiting >= WAITING_MAX:
        raise Refusal(f"{WAITING_MAX} requests wait; allowed: the same request, later", status=429)


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


@dataclass
class _Window:
    """A planned iteration and its requests. error: what ended the thread that hands out the answers."""

    step: int
    requests: dict[str, _Open]
    is_generated: bool = False
    error: BaseException | None = None

    @property
    def prompts(self) -> list[dict[str, Any]]:
        return [each.prompt for each in self.requests.values() for _ in range(each.count)]


class Windows:
    """Takes requests from any thread; `serve`, in a thread of its own, plans and concludes their windows.

    At most algorithm.max_staleness windows are open beside the oldest one. Each has a thread that hands out responses.
    """

    def __init__(self, rollouts: Rollouts, clock: Clock, window_s: float) -> None:
        """window_s: seconds from the first request of a window to its plan, in which more may join.

        Raises WrongStep if another program has planned an iteration that is under way.
        """
        self._rollouts, self._clock, self._window_s = rollouts, clock, window_s
        self._store = connect(rollouts.url)
        self._idle_members = IdleMembers(self._store, clock)
        self._lock, self._news, self._is_closed = threading.Lock(), threading.Event(), False
        self._waiting: dict[str, _Open] = {}
        self._answers: dict[str, Future[Answer]] = {}
        # The oldest window that has not ended.
        self.step = rollouts.step
        self._windows: list[_Window] = []
        self._resumed = self._resume()

    def answer(self, name: str) -> "Future[Answer] | None":
        """The answer to a request that waits, or whose window has not ended; other answers are in the run."""
        return self._answers.get(name)

    def ask(self, name: str, prompt: dict[str, Any], n: int, *, step: int | None = None) -> "Future[Answer] | None":
        """The answer to a request for n responses, which is generated once for any number of calls.

        prompt: as for `Rollouts.submit`, with its tokens. step: `self.step` from before the caller has looked for the
        request in the run; None is returned if a window has ended meanwhile, which may have been the request's.
        Raises Refusal if too many wait for a window, also of clients that have gone or that ask in two steps.
        """
        with self._lock:
            if name not in self._answers:
                if step not in (None, self.step):
                    return None
                check_room(len(self._waiting))
                count = math.ceil(n / self._rollouts.config.run.num_generations)
                self._waiting[name] = opened = _Open(prompt | {REQUEST: name}, count)
                self._answers[name] = opened.answer
                self._news.set()
            return self._answers[name]

    def serve(self) -> None:
        """Plan and conclude window after window, until `close`; raises what `Rollouts` raises."""
        for window in self._resumed:
            self._open(window)
        while (act := self._next_act()) is not None:
            act()

    def close(self) -> None:
        """Let `serve` return when the open windows have ended."""
        self._is_closed = True
        self._news.set()

    def end(self, error: BaseException) -> None:
        """Let every unanswered request fail."""
        for answer in list(self._answers.values()):
            # A window's thread may hand the answer out at the same moment.
            with suppress(InvalidStateError):
                answer.set_exception(error)

    def _resume(self) -> list[_Window]:
        """The windows that an earlier life of the server has planned and not ended."""
        found: list[_Window] = []
        while holds_run(self._store) and exists(self._store, layout.plan(self.step + len(found))):
            window = _Window(self.step + len(found), {})
            for row in prompt_table.read_prompts(self._store, read_plan(self._store, window.step)):
                if REQUEST not in row.columns:
                    raise WrongStep(
                        f"iteration {window.step}: its prompts are another program's, which has to end it first"
                    )
                name = str(row.columns[REQUEST])
                given = {PROMPT: row.prompt, TOKENS: list(row.token_ids), **row.columns}
                window.requests.setdefault(name, _Open(given, 0)).count += 1
            self._answers |= {name: opened.answer for name, opened in window.requests.items()}
            log.warning("iteration %d goes on, with the requests of an earlier life of the server", window.step)
            found.append(window)
        return found

    def _next_act(self) -> Callable[[], None] | None:
        """Wait for what is to be done now; None after `close`. A plan comes first, because a member has no work."""
        config = self._rollouts.config
        while True:
            self._news.clear()
            errors = [window.error for window in self._windows if window.error is not None]
            if errors:
                raise errors[0]
            has_room = len(self._windows) <= config.algorithm.max_staleness
            may_plan = bool(self._waiting) and has_room and not self._is_closed
            steps = [window.step for window in self._windows if not window.is_generated]
            ttl_s = config.rollout.claim_ttl_s
            if may_plan and (not steps or self._idle_members.is_any(steps, ttl_s)):
                return self._plan
            if self._windows and self._windows[0].is_generated:
                return self._conclude
            if self._is_closed and not self._windows:
                return None
            self._news.wait(config.rollout.poll_interval_s if may_plan else None)

    def _plan(self) -> None:
        """Plan the next window: run.num_prompts_per_step prompts at most, or one request."""
        self._clock.sleep(self._window_s)
        room, taken = self._rollouts.config.run.num_prompts_per_step, dict[str, _Open]()
        with self._lock:
            for name, opened in list(self._waiting.items()):
                if taken and opened.count > room:
                    break
                room -= opened.count
                taken[name] = self._waiting.pop(name)
        self._open(_Window(self.step + len(self._windows), taken))

    def _open(self, window: _Window) -> None:
        self._rollouts.submit(window.step, window.prompts)
        self._windows.append(window)
        threading.Thread(target=self._answer, args=(window,), name=f"window {window.step}", daemon=True).start()

    def _conclude(self) -> None:
        """Conclude the oldest window."""
        window = self._windows[0]
        self._rollouts.publish(None, step=window.step)
        ended = self._rollouts.step
        with self._lock:
            self._windows.pop(0)
            self.step = ended
            # A client that asks again reads the run, so that memory does not grow with answers.
            for name in window.requests:
                del self._answers[name]

    def _answer(self, window: _Window) -> None:
        """Hand out the answers of a window, until its last response has ended."""
        try:
            planned_at_s = read_plan(self._store, window.step).created_at_s
            while not self._generated(window, planned_at_s):
                pass
        except BaseException as error:  # noqa: BLE001 - `serve` raises it
            window.error = error
        window.is_generated = window.error is None
        self._news.set()

    def _generated(self, window: _Window, planned_at_s: float) -> bool:
        """Hand out each answer when its last group has come; False if no member has generated for a long time."""
        for opened in window.requests.values():
            opened.groups.clear()
        try:
            for group in self._rollouts.next(window.step):
                opened = window.requests[str(group.columns[REQUEST])]
                opened.groups.append(group)
                if len(opened.groups) == opened.count:
                    # The answer may be there from a look before a timeout, or may have failed with the other windows.
                    with suppress(InvalidStateError):
                        opened.answer.set_result(Answer.of(opened.groups, planned_at_s))
        except GroupTimeout as error:
            log.warning("no member generates; `gleaner join %s` starts one: %s", self._rollouts.url, error)
            return False
        return True
