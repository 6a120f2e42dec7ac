"""The workers of a host as processes of this machine, one for each device and each run that has trained here.

They are forked from one process that has imported torch, so a cold worker reads its checkpoint at once. The ranks of a
worker live and die together: if one ends, the others would wait for it, so they are killed.
"""

import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from storage.fleet_records import AdmittedRun
from tasks.sharing.rank_process import END_TIME_LIMIT_S, RankProcess
from tasks.sharing.rank_states import failed, merged
from tasks.sharing.workers import WorkerPhase, WorkerState

# Another rank complains that one is missing before it is known that this one has ended.
SILENT_END_S = 5.0


class _Worker:
    """The processes of one run, and a thread that ends all of them when one fails."""

    def __init__(self, run: AdmittedRun, disk: Path | None) -> None:
        self._changed = threading.Condition()
        self._failed: WorkerState | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="gleaner-worker-")
        folder = Path(self._folder.name)
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(run.ranks):
                self._ranks.append(RankProcess(run, rank, folder, disk, self._notify))
        except BaseException:
            self._end_ranks()
            self._folder.cleanup()
            raise
        self._attendant = threading.Thread(target=self._attend_failure, daemon=True)
        self._attendant.start()

    @property
    def state(self) -> WorkerState:
        with self._changed:
            return self._failed or merged([rank.state for rank in self._ranks])

    def begin(self, iteration: int, *, onto_disk: bool) -> None:
        self._order("restoring", {"do": "train", "iteration": iteration, "onto_disk": onto_disk})

    def prefetch(self, iteration: int) -> None:
        self._order("prefetching", {"do": "prefetch", "iteration": iteration})

    def _order(self, phase: WorkerPhase, order: Mapping[str, Any]) -> None:
        for rank in self._ranks:
            rank.order(phase, order)

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

    def _attend_failure(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: any(rank.has_failed for rank in self._ranks))
            self._changed.wait_for(self._is_clear, SILENT_END_S)
        self._end_ranks()
        ends = [end for rank in self._ranks if (end := rank.end) is not None]
        last = merged([rank.state for rank in self._ranks])
        with self._changed:
            self._failed = failed(last, ends)

    def _is_clear(self) -> bool:
        """Whether it is known why the worker fails: a rank has ended without a word, or all have ended."""
        ends = [rank.end for rank in self._ranks]
        return all(ends) or any(end is not None and end.failure is None for end in ends)


class ProcessWorkers:
    """See `tasks.sharing.workers.PhaseWorkers`. A context manager: at its end no worker is left.

    disk: a folder for copies of states, with a folder for each run; None: there is no disk for them.
    """

    def __init__(self, disk: Path | None = None) -> None:
        self._disk = disk
        self._workers: dict[str, _Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for run_id in list(self._workers):
            self.evict(run_id)

    def begin(self, run: AdmittedRun, iteration: int, *, onto_disk: bool) -> None:
        self._worker(run).begin(iteration, onto_disk=onto_disk)

    def prefetch(self, run: AdmittedRun, iteration: int) -> None:
        self._worker(run).prefetch(iteration)

    def _worker(self, run: AdmittedRun) -> _Worker:
        """The run's worker; a new one if there is none, or if it has failed."""
        if self.state(run.id).phase == "failed":
            self.evict(run.id)
        if run.id not in self._workers:
            self._workers[run.id] = _Worker(run, None if self._disk is None else self._disk / run.id)
        return self._workers[run.id]

    def state(self, run_id: str) -> WorkerState:
        worker = self._workers.get(run_id)
        return WorkerState() if worker is None else worker.state

    def evict(self, run_id: str) -> None:
        worker = self._workers.pop(run_id, None)
        if worker is not None:
            worker.end()

    def drop_copy(self, run_id: str) -> None:
        if self._disk is not None:
            shutil.rmtree(self._disk / run_id, ignore_errors=True)

    def kill(self, run_id: str) -> None:
        self.evict(run_id)
