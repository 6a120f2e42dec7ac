"""Production's threads, events and locks in virtual time: a process's second thread is a greenlet that takes turns.

So a simulated member runs its decode loop and its housekeeping side by side, as in production, and its history is still
a pure function of its seed. In the modules that use `threading`, only that name is replaced.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace, TracebackType
from typing import Self

from greenlet import getcurrent  # type: ignore[import-untyped]

from simulation.virtual_time import Process, Timeline
from storage import journal
from storage.faults import Crashed
from tasks.sampling.session import bookkeeping, housekeeping

POLL_S = 0.02
MODULES = (bookkeeping, housekeeping, journal)


class Machine(Process):
    """A process whose threads freeze and die with it; `sleep` makes the running thread sleep."""

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        main: Callable[["Machine"], object],
        on_end: Callable[["Machine", BaseException | None], object],
    ) -> None:
        super().__init__(timeline, name, lambda _: self._main_thread(main), lambda _, error: on_end(self, error))
        self.threads: list[Process] = []

    def current(self) -> Process:
        """The running thread; this process itself if that is the main thread."""
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

    def spawn(self, target: Callable[[], object]) -> Process:
        """Start a thread, which ends with the process; if it crashes, the process crashes."""

        def ended(_: Process, error: BaseException | None) -> None:
            if isinstance(error, Crashed) and not self.dead:
                self._timeline.after(0.0, self.kill)

        thread = Process(self._timeline, f"{self.name}/thread", lambda _: target(), ended)
        self.threads.append(thread)
        self._timeline.after(0.0, thread.start)
        return thread

    def _main_thread(self, main: Callable[["Machine"], object]) -> None:
        getcurrent().machine = self
        main(self)


class _Thread:
    def __init__(self, target: Callable[[], object], name: str, *, daemon: bool) -> None:
        del name, daemon
        self._target = target
        self._thread: Process | None = None

    def start(self) -> None:
        machine = _machine()
        self._thread = machine.spawn(lambda: self._run(machine))

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.dead

    def join(self, limit_s: float) -> None:
        for _ in range(int(limit_s / POLL_S)):
            if not self.is_alive():
                return
            _machine().sleep(POLL_S)

    def _run(self, machine: Machine) -> None:
        getcurrent().machine = machine
        self._target()


class _Event:
    """An event for which one thread waits."""

    def __init__(self) -> None:
        self._set = False
        self._waiter: Process | None = None

    def set(self) -> None:
        self._set = True
        if self._waiter is not None:
            self._waiter.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, limit_s: float) -> bool:
        if not self._set:
            self._waiter = _machine().current()
            self._waiter.rest(limit_s)
            self._waiter = None
        return self._set


class _Lock:
    def __init__(self) -> None:
        self._held = False

    def acquire(self, *, blocking: bool = True) -> bool:
        while self._held:
            if not blocking:
                return False
            _machine().sleep(POLL_S)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _machine() -> Machine:
    machine: Machine = getcurrent().machine
    return machine


@contextmanager
def virtual_threads() -> Iterator[None]:
    """Within this context, the modules above create threads, events and locks of virtual time."""
    before = [vars(module)["threading"] for module in MODULES]
    for module in MODULES:
        vars(module)["threading"] = SimpleNamespace(Thread=_Thread, Event=_Event, Lock=_Lock)
    try:
        yield
    finally:
        for module, threading in zip(MODULES, before, strict=True):
            vars(module)["threading"] = threading
