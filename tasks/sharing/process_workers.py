"""The workers of a host as processes of this machine, one for each device and each run that has trained here.

All processes are forked from a starter that has imported torch, so a cold worker reads the checkpoint at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import TypeAdapter

from storage.fleet.fleet_records import AdmittedRun
from storage.fleet.spent_records import Tier
from tasks.learning.rank_ends import RankFailure
from tasks.learning.started_ranks import StartedRanks
from tasks.sharing.workers import Restored, WorkerPhase, WorkerState

STATES = TypeAdapter(WorkerState)
PROGRAM = Path(__file__).with_name("worker_process.py")
# Arrow imports pandas for its first array.
IMPORTS = ("tasks.sharing.phase_trainer", "transformers.modeling_utils", "pandas")
# How far an order has got; phases with equal numbers are equally far.
PROGRESS: dict[WorkerPhase, int] = {
    "absent": 0,
    "prefetching": 0,
    "restoring": 0,
    "replaying": 1,
    "waiting": 2,
    "training": 2,
    "parking": 3,
    "publishing": 4,
    "parked": 5,
}


class _Worker:
    """The ranks of one run."""

    def __init__(self, run: AdmittedRun) -> None:
        self._ranks = StartedRanks(PROGRAM, [run.run_url], IMPORTS, run.ranks, WorkerState(), STATES.validate_python)

    @property
    def state(self) -> WorkerState:
        last, failure = merged_state(self._ranks.states), self._ranks.failure
        return last if failure is None else failed_state(last, failure)

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


def merged_state(states: Sequence[WorkerState]) -> WorkerState:
    """The state of a worker without failed ranks: the state of the rank furthest behind, the first of several.

    The worker holds a resident state only if all ranks hold their parts of a single state.
    """
    behind = min(states, key=lambda state: PROGRESS[state.phase])
    digests = {state.digest for state in states}
    return replace(
        behind,
        digest=behind.digest if len(digests) == 1 else None,
        bytes_held=sum(state.bytes_held for state in states),
        restored=_together([state.restored for state in states]),
        replays=max(state.replays for state in states),
    )


def _together(restored: Sequence[Restored | None]) -> Restored | None:
    """How the ranks together got their parts, with the furthest tier; None unless every rank has its part."""
    found = [each for each in restored if each is not None]
    if len(found) < len(restored):
        return None
    return Restored(
        tier=max((each.tier for each in found), key=get_args(Tier).index),
        seconds=max(each.seconds for each in found),
        num_bytes=sum(each.num_bytes for each in found),
        ahead=found[0].ahead,
    )


def failed_state(last: WorkerState, failure: RankFailure) -> WorkerState:
    """The state of a worker whose processes have all ended with `failure`; last: the state at that time."""
    return replace(last, phase="failed", digest=None, bytes_held=0, message=failure.message, lasting=failure.lasting)
