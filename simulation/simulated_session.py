"""Production's session in virtual time: the machine's process, and its lanes as threads that take turns.

A simulated member runs its lanes side by side, as in production, and its history is still a
pure function of its seed.
"""

from collections.abc import Callable
from typing import Any

from greenlet import getcurrent  # type: ignore[import-untyped]

from simulation.virtual_time import Process, Timeline
from storage.stores.faults import Crashed
from tasks.sampling.session.actions import Lane
from tasks.sampling.session.session import Session


class Machine(Process):
    """A process whose threads freeze and die with it; `sleep` makes the running thread sleep."""

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        main: Callable[["Machine"], object],
        on_end: Callable[["Machine", BaseException | None], object],
    ) -> None:
        super().__init__(timeline, name, lambda _: main(self), lambda _, error: on_end(self, error))
        self.threads: list[Process] = []

    def current(self) -> Process:
        """The running thread; in the main thread, this process itself."""
        here = getcurrent()
        return next((thread for thread in self.threads if thread.runs_in(here)), self)

    def sleep(self, duration_s: float) -> None:
        thread = self.current()
        if thread is self:
            super().sleep(duration_s)
        else:
            thread.sleep(duration_s)

    def kill(self) -> None:
        super().kill()
        for thread in self.threads:
            thread.kill()

    def freeze(self, duration_s: float) -> None:
        super().freeze(duration_s)
        for thread in self.threads:
            thread.freeze(duration_s)

    def spawn(self, target: Callable[[], object]) -> None:
        """Start a thread, which ends with the process; if it crashes, the process crashes."""

        def ended(_: Process, error: BaseException | None) -> None:
            if isinstance(error, Crashed) and not self.dead:
                self._timeline.after(0.0, self.kill)

        thread = Process(self._timeline, f"{self.name}/thread", lambda _: target(), ended)
        self.threads.append(thread)
        self._timeline.after(0.0, thread.start)


class SimulatedSession(Session):
    """A session whose lanes wait in virtual time."""

    def __init__(self, process: Machine, *given: Any, **named: Any) -> None:
        """The arguments after `process` are those of Session."""
        super().__init__(*given, clock=process.clock, **named)
        self._process = process
        self._resting: dict[Lane, Process] = {}
        self._is_woken = dict.fromkeys(Lane, False)

    def rest(self, lane: Lane, until_s: float) -> None:
        """Let other processes run meanwhile."""
        if not self._is_woken[lane]:
            thread = self._resting[lane] = self._process.current()
            thread.rest(self._process.clock.true_s(max(0.0, until_s - self.clock.monotonic())))
            del self._resting[lane]
        self._is_woken[lane] = False

    def wake(self, lane: Lane) -> None:
        """Wake the lane's thread."""
        self._is_woken[lane] = True
        if lane in self._resting:
            self._resting[lane].wake()

    def start(self, lane: Lane) -> None:
        """Start a thread of the process."""
        self._process.spawn(lambda: self.perform_all(lane))
