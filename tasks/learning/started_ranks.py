"""The ranks that one process starts on this machine, for a train task or for a run's worker on a fleet's host.

Ranks are forked from a process that has imported torch. Ranks meet in a folder of this user alone
(`tasks.learning.loopback`), out of reach of other machines. After the failure of a rank, the remaining ranks would wait
for ever, so the launcher kills every rank. Ranks end with the process of their launcher.
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
    """A context manager of ranks that run `program`; a failure of any rank, and the end of the block, end every rank.

    Args:
        program: As for `RankProcess`.
        arguments: As for `RankProcess`.
        imports: As for `RankProcess`.
        count: The number of ranks.
        state: As for `RankProcess`.
        read: As for `RankProcess`.
        stopped_limit_s: Seconds that ranks wait for a rank that a signal has stopped (SIGSTOP).
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
        """The state of each rank, in order."""
        return [rank.state for rank in self._ranks]

    @property
    def failure(self) -> RankFailure | None:
        """The reason for a failure, after the end of all ranks; None until then, and after a success."""
        with self._changed:
            return self._failure

    def order(self, order: Mapping[str, Any], then: Callable[[State], State]) -> None:
        """Give every rank an order, which must fit JSON; see `RankProcess.order`."""
        for rank in self._ranks:
            rank.order(order, then)

    def wait(self) -> RankFailure | None:
        """Wait for the end of all ranks, and return the reason for a failure, or None after a success."""
        with self._changed:
            self._changed.wait_for(lambda: self._are_done or self._failure is not None)
            return self._failure

    def end(self) -> None:
        """Kill the processes and wait for their end, after which devices and memory are free."""
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
        """Log stopped ranks; return a failure if a rank stays stopped for longer than the limit."""
        stopped = {f"rank {rank.number}": process for rank in self._ranks if (process := rank.stopped) is not None}
        why = self._waiting.given_up(stopped)
        return None if why is None else RankFailure(message=why)

    def _is_over(self) -> bool:
        return self._has_failed() or all(rank.end for rank in self._ranks)

    def _has_failed(self) -> bool:
        return any(rank.has_failed for rank in self._ranks)

    def _is_clear(self) -> bool:
        """Whether the cause of the failure is known: a rank has ended without a report, or every rank has ended."""
        ends = [rank.end for rank in self._ranks]
        return all(ends) or any(end is not None and end.failure is None and not end.done for end in ends)
