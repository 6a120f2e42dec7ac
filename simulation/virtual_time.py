"""Virtual time: processes are greenlets that take turns when they wait, in an order that a seed decides.

A whole history of many processes runs in one thread and is a pure function of its seed. Every process has a clock with
its own zero and rate, and can be killed or frozen wherever it waits.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from greenlet import greenlet  # type: ignore[import-untyped]

from storage.stores.faults import Crashed

# Times that are counted from different beginnings may differ by this.
ROUNDING_S = 1e-6


@dataclass
class Agenda:
    """What is scheduled, in true time, and by when and in how many turns it must be over."""

    rng: random.Random
    limit_s: float
    turns_max: int
    now_s: float = 0.0
    turns: int = 0
    entries: list[tuple[float, float, int, Callable[[], object]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def is_over(self, when_s: float) -> bool:
        return when_s > self.limit_s or self.turns > self.turns_max


class Timeline:
    """True time in seconds since a beginning, and the schedule of actions; those of one moment run in random order."""

    def __init__(self, rng: random.Random, limit_s: float, turns_max: int) -> None:
        self._agenda = Agenda(rng, limit_s, turns_max)
        self._zero_s = 0.0

    def beginning_now(self) -> "Timeline":
        """The same time and schedule, counted from now on."""
        later = Timeline(self._agenda.rng, 0.0, 0)
        later._agenda, later._zero_s = self._agenda, self._agenda.now_s
        return later

    def allow(self, limit_s: float, turns_max: int) -> None:
        """Let time and schedule last for at least so much longer."""
        agenda = self._agenda
        agenda.limit_s = max(agenda.limit_s, agenda.now_s + limit_s)
        agenda.turns_max = max(agenda.turns_max, agenda.turns + turns_max)

    @property
    def now_s(self) -> float:
        return self._agenda.now_s - self._zero_s

    @property
    def zero_s(self) -> float:
        """The true time of the beginning."""
        return self._zero_s

    @property
    def turns(self) -> int:
        return self._agenda.turns

    def at(self, when_s: float, action: Callable[[], object]) -> None:
        """Schedule `action`, which the timeline itself calls and which must not wait."""
        agenda = self._agenda
        true_s = max(when_s + self._zero_s, agenda.now_s)
        heapq.heappush(agenda.entries, (true_s, agenda.rng.random(), next(agenda.numbers), action))

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        self.at(self.now_s + delay_s, action)

    def skip_to(self, when_s: float) -> bool:
        """Advance time to this moment if no action is scheduled before it; whether it was done."""
        agenda, true_s = self._agenda, when_s + self._zero_s
        if agenda.is_over(true_s) or (agenda.entries and true_s >= agenda.entries[0][0]):
            return False
        agenda.now_s = true_s
        agenda.turns += 1
        return True

    def run(self) -> bool:
        """Run all actions; False if they did not end within the limits."""
        agenda = self._agenda
        while agenda.entries:
            agenda.now_s, _, _, action = heapq.heappop(agenda.entries)
            agenda.turns += 1
            if agenda.is_over(agenda.now_s):
                return False
            action()
        return True


class Process:
    """One process life: `main` runs from `start` until it returns, raises, or is killed.

    The process waits only inside `sleep` and `rest`. `on_end` gets the exception that ended the process, or None.
    """

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        main: Callable[["Process"], object],
        on_end: Callable[["Process", BaseException | None], object],
    ) -> None:
        self.name = name
        self.dead = False
        self.frozen_until_s = 0.0
        self.clock: ProcessClock
        self._timeline = timeline
        self._main = main
        self._on_end = on_end
        self._turn = 0
        self._greenlet: greenlet | None = None

    def start(self) -> None:
        """Start the process; called by the timeline."""
        if not self.dead:
            self._greenlet = greenlet(self._run)
            self._greenlet.switch()

    def sleep(self, duration_s: float) -> None:
        """Let the remaining processes run for `duration_s` of true time; called from within the process."""
        if self.dead:
            raise Crashed(f"{self.name} is dead")
        wake_s = self._timeline.now_s + max(0.0, duration_s)
        if self._timeline.skip_to(wake_s):
            return
        self._wake_at(wake_s)
        greenlet.getcurrent().parent.switch()

    def rest(self, duration_s: float) -> None:
        """Sleep until the time is over or `wake` is called."""
        if self.dead:
            raise Crashed(f"{self.name} is dead")
        self._wake_at(self._timeline.now_s + max(0.0, duration_s))
        greenlet.getcurrent().parent.switch()

    def wake(self) -> None:
        """End a `rest`."""
        if not self.dead:
            self._wake_at(self._timeline.now_s)

    def runs_in(self, here: greenlet) -> bool:
        return self._greenlet is here

    def kill(self) -> None:
        """End the process where it waits; called by the timeline. Actions during its unwinding have no effect."""
        if self.dead:
            return
        self.dead = True
        if self._greenlet is not None:
            self._greenlet.throw(Crashed, f"{self.name} was killed")

    def freeze(self, duration_s: float) -> None:
        """Stop the process where it waits; later it goes on as if nothing had happened. Called by the timeline."""
        self.frozen_until_s = max(self.frozen_until_s, self._timeline.now_s + duration_s)

    def _wake_at(self, wake_s: float) -> None:
        self._turn += 1
        turn = self._turn
        self._timeline.at(wake_s, lambda: self._wake(turn))

    def _wake(self, turn: int) -> None:
        if self.dead or turn != self._turn:
            return
        if self.frozen_until_s - self._timeline.now_s > ROUNDING_S:
            self._wake_at(self.frozen_until_s)
        elif self._greenlet is not None:
            self._greenlet.switch()

    def _run(self) -> None:
        ended_with: BaseException | None = None
        try:
            self._main(self)
        except (Exception, Crashed) as error:  # noqa: BLE001 - on_end judges any error
            ended_with = error
        self.dead = True
        self._on_end(self, ended_with)


class ProcessClock:
    """A machine's clocks, with a zero and a rate of their own."""

    def __init__(self, timeline: Timeline, process: Process, rng: random.Random) -> None:
        self._timeline = timeline
        self._process = process
        self._rate = rng.uniform(0.85, 1.15)
        self._monotonic_zero_s = rng.uniform(0, 1e5)
        self._wall_zero_s = 1.7e9 + timeline.zero_s + rng.uniform(-300, 300)
        self._stopped_until_s = -math.inf

    def monotonic(self) -> float:
        return self._monotonic_zero_s + self._rate * self._timeline.now_s

    def wall(self) -> float:
        return self._wall_zero_s + self._rate * self._timeline.now_s

    def sleep(self, duration_s: float) -> None:
        self._process.sleep(self.true_s(duration_s))

    def true_s(self, duration_s: float) -> float:
        """How long this duration of the machine's clock takes in true time."""
        return duration_s / self._rate

    def stop(self, duration_s: float) -> None:
        """Stop the clocks for this long from now on, as in a suspended virtual machine; they stand still once only."""
        now_s = self._timeline.now_s
        until_s = max(self._stopped_until_s, now_s + duration_s)
        self._monotonic_zero_s -= self._rate * (until_s - max(self._stopped_until_s, now_s))
        self._stopped_until_s = until_s

    def jump(self, offset_s: float) -> None:
        """Set the wall clock forward, or back if negative."""
        self._wall_zero_s += offset_s
