"""The scorers of `teacher.pool` in virtual time: as many machines, which score groups as groups end.

A scorer takes the group that ended first. Training gets a group when its scores are there.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from tasks.crew_model.accounts import Account
from tasks.crew_model.events import Events


@dataclass(frozen=True, kw_only=True)
class ScorersScenario:
    """The scorers' machines, which are always available, and go when an iteration is scored.

    Attributes:
        name: name of the pool.
        count: number of machines, with one scorer on each.
        usd_per_h: price of one machine.
        gpus: GPUs of one machine, for GPU-seconds.
        start_s: paid seconds until a process can start on a new machine: provisioning and image.
        process_s: seconds from the start of a process until the teacher is loaded.
        score_s_per_token: seconds of one scorer per generated token; 0: left out.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    name: str
    count: Annotated[int, Field(ge=1)]
    usd_per_h: Annotated[float, Field(ge=0)]
    gpus: Annotated[float, Field(ge=0)] = 1.0
    start_s: Annotated[float, Field(ge=0)] = 0.0
    process_s: Annotated[float, Field(ge=0)] = 0.0
    score_s_per_token: Annotated[float, Field(ge=0)]


class Scoring:
    """The scoring of one iteration, which begins now.

    Args:
        events: the events of the simulation.
        scenario: the scorers.
        account: account of the scorers' machines.
        group_tokens: generated tokens of each group.
        on_scored: called with a group when its scores are there.
    """

    def __init__(
        self,
        events: Events,
        scenario: ScorersScenario,
        account: Account,
        group_tokens: list[int],
        on_scored: Callable[[int], None],
    ) -> None:
        self._events, self._scenario, self._account = events, scenario, account
        self._group_tokens, self._on_scored = group_tokens, on_scored
        self._began_s, self._worked_s = events.now_s, 0.0
        self._ended: deque[int] = deque()
        self._left, self._free = len(group_tokens), 0
        events.after(scenario.start_s + scenario.process_s, self._ready)

    def group_ended(self, group: int) -> None:
        """Note a group whose responses have all ended."""
        self._ended.append(group)
        self._take()

    def _ready(self) -> None:
        self._free = self._scenario.count
        self._take()

    def _take(self) -> None:
        while self._free and self._ended:
            group = self._ended.popleft()
            self._free -= 1
            duration_s = self._group_tokens[group] * self._scenario.score_s_per_token
            self._worked_s += duration_s
            self._events.after(duration_s, lambda group=group: self._scored(group))  # type: ignore[misc]

    def _scored(self, group: int) -> None:
        self._free += 1
        self._left -= 1
        if not self._left:
            self._leave()
        self._on_scored(group)
        self._take()

    def _leave(self) -> None:
        """Book the machines' time: they were taken with the plan, and go now."""
        count, scenario = self._scenario.count, self._scenario
        paid_s = count * (self._events.now_s - self._began_s)
        starting_s, process_s = count * scenario.start_s, count * scenario.process_s
        self._account.add("starting", starting_s)
        self._account.add("process", process_s)
        self._account.add("prefill", self._worked_s)
        self._account.add("idle", max(0.0, paid_s - starting_s - process_s - self._worked_s))
