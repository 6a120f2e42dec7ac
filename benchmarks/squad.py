"""A squad of worker processes that timed blows kill or stop, and an account of its engines' time.

Killed workers are replaced, and stopped ones continue later. Blows come from a spot trace, and their times count from
the start of the squad, so that the same blows can strike several designs.
"""

import heapq
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from benchmarks.crew_processes import PREFILL, Crew, StepLog
from resources.spot_trace import SpotTrace

POLL_INTERVAL_S = 0.002
LOOK_INTERVAL_S = 0.1
LEAVE_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Blow:
    """At `at_s` a place's worker is killed, or stopped (`hang`); at `ready_s` its successor starts, or it resumes."""

    at_s: float
    place: int
    hang: bool
    ready_s: float


def draw_blows(trace: SpotTrace, *, cold_start_s: float, hang_share: float, seed: int) -> list[Blow]:
    """The losses of a part of a trace, in order; a place that is lost again before its successor starts stays down.

    Spot traces have losses only. With probability `hang_share` a loss becomes a hang, for as long as the place was
    empty. At the end of the trace all places are filled.
    """
    rng = random.Random(seed)
    blows: list[Blow] = []
    for place, name in enumerate(sorted({event.node for event in trace.events})):
        struck: Blow | None = None
        for event in trace.events:
            if event.node != name or event.time_s == 0:
                continue
            if event.up and struck is not None:
                blows.append(replace(struck, ready_s=event.time_s + (0.0 if struck.hang else cold_start_s)))
                struck = None
            elif not event.up and blows and blows[-1].place == place and event.time_s <= blows[-1].ready_s:
                struck = blows.pop()
            elif not event.up:
                hang = rng.random() < hang_share
                struck = Blow(at_s=event.time_s, place=place, hang=hang, ready_s=trace.span_s)
        blows += [struck] if struck is not None else []
    return sorted(blows, key=lambda blow: (blow.at_s, blow.place))


@dataclass(frozen=True, kw_only=True)
class SquadRun:
    """The record of a run.

    Attributes:
        started_s: the start, on the machine's monotonic clock.
        duration_s: the time until the work was complete.
        lives: the place and log of every process.
        blows: the blows that struck a worker.
    """

    started_s: float
    duration_s: float
    lives: Sequence[tuple[int, StepLog]]
    blows: Sequence[Blow]


@dataclass(frozen=True, kw_only=True)
class EngineTime:
    """The use of a squad's time.

    Attributes:
        up_s: seconds of places with a running process, until the work was complete.
        busy_s: the part of up_s in engine steps and prefills.
        prefill_s: the part of busy_s in prefills.
        wasted_s: the part of busy_s that decoded tokens which are not in the result.
        steps: the steps of all engines together.
        tokens: the decoded tokens.
        tokens_again: the decoded tokens that are not in the result.
    """

    up_s: float
    busy_s: float
    prefill_s: float
    wasted_s: float
    steps: int
    tokens: int
    tokens_again: int

    @property
    def idle_s(self) -> float:
        return self.up_s - self.busy_s

    @property
    def step_s(self) -> float:
        """The mean duration of a step, which is longer than requested if the machine is overloaded."""
        return (self.busy_s - self.prefill_s) / self.steps


class Squad:
    """Starts a process per place, applies the blows, and waits until the work is complete; for one run."""

    def __init__(
        self,
        folder: Path,
        body: Callable[..., None],
        arguments: Sequence[tuple[object, ...]],
        *,
        detect_s: float = 0.0,
        detected: Callable[[int, int], None] = lambda _place, _pid: None,
    ) -> None:
        """Create a squad in which body(*arguments[place], log path) is the process of a place.

        detected: called with place and pid, `detect_s` after a blow, if the worker has not come back by then.
        """
        self._crew = Crew(folder)
        self._body = body
        self._arguments = arguments
        self._detect_s = detect_s
        self._detected = detected
        self._running: dict[int, ForkServerProcess] = {}
        self._lives: list[tuple[int, StepLog]] = []
        self._struck: list[Blow] = []
        self._left: set[int] = set()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._started_s = 0.0

    def run(self, blows: Iterable[Blow], complete: Callable[[], bool]) -> SquadRun:
        """Apply the blows until `complete`, which is called every LOOK_INTERVAL_S, returns True.

        Raises RuntimeError when a worker fails, or when all have left before the work is complete.
        """
        self._started_s = time.monotonic()
        for blow in blows:
            self._at(blow.at_s, partial(self._strike, blow))
        for place in range(len(self._arguments)):
            self._start(place)
        try:
            ended_s = self._wait(complete)
        finally:
            self._end()
        return SquadRun(
            started_s=self._started_s,
            duration_s=ended_s - self._started_s,
            lives=self._lives,
            blows=self._struck,
        )

    def _wait(self, complete: Callable[[], bool]) -> float:
        next_look_s = 0.0
        while True:
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                heapq.heappop(self._due)[2]()
            self._collect()
            if now_s >= next_look_s or not self._running:
                next_look_s = now_s + LOOK_INTERVAL_S
                if complete():
                    return now_s
                if not self._running and not self._due:
                    raise RuntimeError("all workers have left and the work is not complete")
            time.sleep(POLL_INTERVAL_S)

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._started_s + time_s, next(self._order), action))

    def _strike(self, blow: Blow) -> None:
        process = self._running.get(blow.place)
        if process is None or process.pid is None or not process.is_alive():
            return
        self._struck.append(blow)
        os.kill(process.pid, signal.SIGSTOP if blow.hang else signal.SIGKILL)
        if blow.ready_s > blow.at_s + self._detect_s:
            self._at(blow.at_s + self._detect_s, partial(self._detected, blow.place, process.pid))
        if blow.hang:
            self._at(blow.ready_s, partial(os.kill, process.pid, signal.SIGCONT))
        else:
            del self._running[blow.place]
            process.join()
            self._at(blow.ready_s, partial(self._start, blow.place))

    def _start(self, place: int) -> None:
        if place in self._left:
            return
        self._running[place], log = self._crew.start(self._body, self._arguments[place])
        self._lives.append((place, log))

    def _collect(self) -> None:
        """Collect the workers that have left by themselves."""
        ended = [place for place, process in self._running.items() if not process.is_alive()]
        for place in ended:
            process = self._running.pop(place)
            process.join()
            if process.exitcode != 0:
                raise RuntimeError(f"the worker of place {place} ended with exit code {process.exitcode}")
            self._left.add(place)

    def _end(self) -> None:
        """Wait for workers that are about to leave, and kill those that are stopped or stuck."""
        patience_s = time.monotonic() + LEAVE_TIMEOUT_S
        stopped = {blow.place for blow in self._struck if blow.hang}
        for place, process in self._running.items():
            if place not in stopped:
                process.join(max(0.0, patience_s - time.monotonic()))
            process.kill()
            process.join()


def engine_time(run: SquadRun, places: int, lengths: Mapping[int, int]) -> EngineTime:
    """Account for a run whose result has `lengths` tokens per response.

    The wasted part of a response's engine time is the share of its decoded tokens that are not in the result. Stopped
    time is not engine time, and places that are empty or stopped are not up. Time after completion does not count.
    """
    end_s = run.started_s + run.duration_s
    down: dict[int, list[tuple[float, float]]] = {place: [] for place in range(places)}
    for blow in run.blows:
        down[blow.place].append((run.started_s + blow.at_s, run.started_s + blow.ready_s))
    seconds: defaultdict[int, float] = defaultdict(float)
    tokens: Counter[int] = Counter()
    steps = 0
    for place, log in run.lives:
        for at_s, step in groupby(log.rows(), key=lambda row: row.at_s):
            rows = list(step)
            steps += at_s <= end_s and rows[0].response != PREFILL
            step_s = sum(row.duration_s for row in rows)
            stopped_s = sum(_overlap_s((at_s - step_s, at_s), span) for span in down[place])
            for row in rows if at_s <= end_s else ():
                seconds[row.response] += row.duration_s * (1 - stopped_s / step_s)
                tokens[row.response] += row.tokens
    again = {response: max(0, n - lengths.get(response, 0)) for response, n in tokens.items()}
    wasted_s = sum(seconds[r] * again[r] / tokens[r] for r in again if tokens[r])
    down_s = sum(_overlap_s((run.started_s, end_s), span) for spans in down.values() for span in spans)
    return EngineTime(
        up_s=places * run.duration_s - down_s,
        busy_s=sum(seconds.values()),
        prefill_s=seconds[PREFILL],
        wasted_s=wasted_s,
        steps=steps,
        tokens=tokens.total(),
        tokens_again=sum(again.values()),
    )


def _overlap_s(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
