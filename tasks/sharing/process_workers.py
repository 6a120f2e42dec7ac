"""The workers of a host as processes of this machine, one for each device and each run that has trained here.

All processes are forked from a starter that has imported torch, so a cold worker reads the checkpoint at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from storage.fleet.fleet_records import AdmittedRun
from tasks.learning.started_ranks import StartedRanks
from tasks.sharing.rank_states import failed, merged
from tasks.sharing.workers import WorkerPhase, WorkerState

STATES = TypeAdapter(WorkerState)
PROGRAM = Path(__file__).with_name("worker_process.py")
IMPORTS = ("tasks.sharing.phase_trainer", "transformers.modeling_utils")


class _Worker:
    """The ranks of one run."""

    def __init__(self, run: AdmittedRun) -> None:
        self._ranks = StartedRanks(PROGRAM, [run.run_url], IMPORTS, run.ranks, WorkerState(), STATES.validate_python)

    @property
    def state(self) -> WorkerState:
        last, failure = merged(self._ranks.states), self._ranks.failure
        return last if failure is None else failed(last, failure)

    def begin(self, iteration: int) -> None:
        self._order("restoring", {"do": "train", "iteration": iteration})

    def prefetch(self, iteration: int) -> None:
        self._order("prefetching", {"do": "prefetch", "iteration": iteration})

    def _order(self, phase: WorkerPhase, order: Mapping[str, Any]) -> None:
        # What a rank holds stays so until it says more.
        self._ranks.order(
            order, lambda state: replace(state, phase=phase, iteration=order["iteration"], restored=None, replays=0)
        )

    def end(self) -> None:
        """End all processes, and so free the devices and the memory."""
        self._ranks.end()


class ProcessWorkers:
    """See `tasks.sharing.workers.PhaseWorkers`. A context manager that ends all workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for run_id in list(self._workers):
            self.evict(run_id)

    def begin(self, run: AdmittedRun, iteration: int) -> None:
        self._worker(run).begin(iteration)

    def prefetch(self, run: AdmittedRun, iteration: int) -> None:
        self._worker(run).prefetch(iteration)

    def _worker(self, run: AdmittedRun) -> _Worker:
        """The run's worker; a new worker if the run has none, or a failed worker."""
        if self.state(run.id).phase == "failed":
            self.evict(run.id)
        if run.id not in self._workers:
            self._workers[run.id] = _Worker(run)
        return self._workers[run.id]

    def state(self, run_id: str) -> WorkerState:
        worker = self._workers.get(run_id)
        return WorkerState() if worker is None else worker.state

    def evict(self, run_id: str) -> None:
        worker = self._workers.pop(run_id, None)
        if worker is not None:
            worker.end()

    def kill(self, run_id: str) -> None:
        self.evict(run_id)

    def kill_on_device(self) -> None:
        """Kill the worker that has the devices, if any."""
        for run_id in [run_id for run_id in self._workers if self.state(run_id).has_device]:
            self.kill(run_id)
