"""The ranks that one process starts on this machine, for a train task or for a run's worker on a fleet's host.

They are forked from one process that has imported torch. They find each other in a folder of this user alone
(`tasks.learning.loopback`), and no other machine can reach them. They live and die together: if one fails, the others
would wait for it, so they are killed. All end with the process that has started them.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self

from storage.clock import SystemClock
from storage.paths import folder_for_sockets
from storage.waiting import STOPPED_LIMIT_S, STOPPED_LOOK_S, StoppedProcesses
from tasks.learning.rank_ends import RankFailure, failure_of
from tasks.learning.rank_process import END_TIME_LIMIT_S, RankProcess, State

# Another rank complains that one is missing before it is known that this one has ended.
SILENT_END_S = 5.0


class StartedRanks(Generic[State]):
    """Ranks that run `program`, and a thread that ends all of them when one fails. As a context manager it ends them.

    count: how many. stopped_limit_s: for how long they wait for one that a signal has stopped (SIGSTOP). The other
    arguments are those of `RankProcess`.
    """

    def __init__(
        self,
        program: Path,
        arguments: Sequence[str],
        imports: Sequence[str],
        count: int,
        state: State,
        read: Callable[[Any], State],
        *,
        stopped_limit_s: float = STOPPED_LIMIT_S,
    ) -> None:
        # A rank that a signal has stopped keeps the others in their collectives, where they see nothing of it.
        self._waiting = StoppedProcesses(SystemClock(), "all ranks are ended", stopped_limit_s)
        self._changed = threading.Condition()
        self._failure: RankFailure | None = None
        self._are_done = False
        self._folder = folder_for_sockets("gleaner-ranks-")
        self._ranks: list[RankProcess[State]] = []
        try:
            for rank in range(count):
                folder = Path(self._folder.name)
                self._ranks.append(
                    RankProcess(program, arguments, imports, folder, rank, count, state, read, self._notify)
                )
        except BaseException:
            self._end_ranks()
            self._folder.cleanup()
            raise
        self._attendant = threading.Thread(target=self._attend, daemon=True)
        self._attendant.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def states(self) -> list[State]:
        """What each rank does, in order."""
        return [rank.state for rank in self._ranks]

    @property
    def failure(self) -> RankFailure | None:
        """Why they have failed, when all have ended; None before, and if their work is done."""
        with self._changed:
            return self._failure

    def order(self, order: Mapping[str, Any], then: Callable[[State], State]) -> None:
        """Give all the same order, which must fit JSON; see `RankProcess.order`."""
        for rank in self._ranks:
            rank.order(order, then)

    def wait(self) -> RankFailure | None:
        """Wait until all have ended; why they failed, or None if their work is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._are_done or self._failure is not None)
            return self._failure

    def end(self) -> None:
        """Kill all processes and wait for their end: the devices and their memory are free then."""
        self._end_ranks()
        # It waits without end for a process that no signal ends, as in a driver that hangs.
        self._attendant.join(END_TIME_LIMIT_S)
        self._folder.cleanup()

    def _end_ranks(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _attend(self) -> None:
        with self._changed:
            given_up = None
            while given_up is None and not self._changed.wait_for(self._is_over, STOPPED_LOOK_S):
                given_up = self._look_for_stopped()
            if given_up is None and not self._has_failed():
                self._are_done = True
                self._changed.notify_all()
                return
            self._changed.wait_for(lambda: given_up is not None or self._is_clear(), SILENT_END_S)
        self._end_ranks()
        ends = [end for rank in self._ranks if (end := rank.end) is not None]
        with self._changed:
            self._failure = given_up or failure_of(ends)
            self._changed.notify_all()

    def _look_for_stopped(self) -> RankFailure | None:
        """Tell of ranks that are stopped; the failure of all when one stays so for too long."""
        stopped = {f"rank {rank.number}": process for rank in self._ranks if (process := rank.stopped) is not None}
        why = self._waiting.given_up(stopped)
        return None if why is None else RankFailure(message=why)

    def _is_over(self) -> bool:
        return self._has_failed() or all(rank.end for rank in self._ranks)

    def _has_failed(self) -> bool:
        return any(rank.has_failed for rank in self._ranks)

    def _is_clear(self) -> bool:
        """Whether it is known why the ranks fail: one has ended without a word, or all have ended."""
        ends = [rank.end for rank in self._ranks]
        return all(ends) or any(end is not None and end.failure is None and not end.done for end in ends)
