"""The workers of a simulated host: they restore, train, park and publish in drawn times, hang, and die.

A worker goes by production's rule of which resident state it may use. What it trains is a function of nothing but where
it came from, so every computation of a phase has a digest of its own, as if its last bits differed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from simulation.ledger_of_fleet import LedgerOfFleet
from simulation.simulated_fleet_history import FleetHistory
from simulation.simulated_session import Machine
from simulation.virtual_time import Process, Timeline
from storage import layout, records
from storage.clock import Clock
from storage.faults import Crashed
from storage.fleet_records import AdmittedRun
from storage.run import exists
from storage.store import ObjectStore, StorageError, StoreDenied, StoreUnavailable
from storage.weights.manifest import Manifest
from storage.weights.tensor_sets import read_manifest
from tasks.sharing import residents
from tasks.sharing.workers import WorkerState

# Longer than any phase may take before it is killed.
HANG_S = 500.0
TRIES = 4
Result = TypeVar("Result")


@dataclass
class _Worker:
    """A worker's process of the present phase, and what it does. ended: whether it was ended from outside."""

    state: WorkerState
    process: Process | None = None
    ended: bool = False


class SimulatedWorkers:
    """PhaseWorkers in virtual time. connect: the store of a run by its url, for a process of this host by name.

    memory_bytes: what the states of all workers that are not at work may take.
    """

    def __init__(
        self,
        history: FleetHistory,
        timeline: Timeline,
        ledger: LedgerOfFleet,
        host: Machine,
        connect: Callable[[str, str], ObjectStore],
        memory_bytes: int,
    ) -> None:
        self._history = history
        self._timeline = timeline
        self._ledger = ledger
        self._host = host
        self._connect = connect
        self._memory_bytes = memory_bytes
        self._workers: dict[str, _Worker] = {}
        self._begun = 0

    def begin(self, run: AdmittedRun, iteration: int) -> None:
        self._ledger.note_begun(self._host.name, run.id, iteration)
        worker = self._workers.setdefault(run.id, _Worker(WorkerState()))
        worker.state = replace(worker.state, phase="restoring", iteration=iteration)
        self._check_memory(run)
        self._begun += 1
        name = f"{self._host.name}/{self._begun}"
        process = Process(
            self._timeline,
            name,
            lambda _: self._work(worker, run, iteration, name),
            lambda _, error: self._ended(worker, run.id, error),
        )
        worker.process = process
        self._host.threads = [*(thread for thread in self._host.threads if not thread.dead), process]
        self._timeline.after(0.0, process.start)

    def state(self, run_id: str) -> WorkerState:
        worker = self._workers.get(run_id)
        return WorkerState() if worker is None else worker.state

    def evict(self, run_id: str) -> None:
        if self.state(run_id).has_device:
            self._ledger.breaks(f"error: {self._host.name} evicts {run_id}, which has the device")
        self._end(run_id)
        self._workers.pop(run_id, None)

    def kill(self, run_id: str) -> None:
        self._end(run_id)
        self._workers[run_id] = _Worker(WorkerState(phase="failed", message="killed"))

    def strike(self, rng: random.Random) -> None:
        """Let one of the workers die that are at work."""
        busy = sorted(run for run, worker in self._workers.items() if worker.state.is_busy)
        if busy:
            self.kill(rng.choice(busy))

    def _check_memory(self, run: AdmittedRun) -> None:
        others = [worker.state for name, worker in self._workers.items() if name != run.id]
        idle_bytes = sum(state.bytes_held for state in others if not state.is_busy)
        if idle_bytes and sum(state.bytes_held for state in others) + run.state_bytes > self._memory_bytes:
            self._ledger.breaks(f"memory: {self._host.name} keeps {idle_bytes} bytes of parked states beside {run.id}")

    def _end(self, run_id: str) -> None:
        """End a worker's process; a request that is on its way may still arrive."""
        worker = self._workers.get(run_id)
        if worker is not None:
            worker.ended = True
            self._ledger.note_freed(self._host.name, run_id)
            if worker.state.is_busy:
                self._ledger.note_fault("worker ended")
            if worker.process is not None:
                self._timeline.after(0.0, worker.process.kill)

    def _ended(self, worker: _Worker, run_id: str, error: BaseException | None) -> None:
        """A phase's process has ended by itself, by a fault, or with its host."""
        if worker.ended:
            return
        self._ledger.note_freed(self._host.name, run_id)
        if error is not None and not self._host.dead:
            self._ledger.note_fault(f"worker: {type(error).__name__}")
            worker.state = WorkerState(phase="failed", message=str(error))
            if not isinstance(error, StorageError | Crashed):
                self._ledger.breaks(f"error: a worker of {self._host.name} ended with {error!r}")

    def _work(self, worker: _Worker, run: AdmittedRun, iteration: int, name: str) -> None:
        """One phase: a function of the checkpoint, or of the resident state that equals it."""
        history, clock = self._history, self._host.clock
        rng = random.Random(f"phase {name} {run.id} {iteration} {history.seed}")
        store = self._connect(run.run_url, name)
        stored = patient(clock, lambda: read_manifest(store, layout.checkpoint(iteration)))
        if patient(clock, lambda: exists(store, layout.manifest(layout.checkpoint(iteration + 1)))):
            # The host that trained it died before it published the weights.
            self._publish(worker, run, store, iteration, None)
            return
        digest = worker.state.digest
        if residents.is_usable(digest, stored.digest):
            self._ledger.note_resident(self._host.name, run.id, digest, stored.digest)
            clock.sleep(rng.uniform(0.1, 1.0))
        else:
            digest = stored.digest
            clock.sleep(rng.uniform(1.0, 10.0))
        worker.state = WorkerState(phase="waiting", iteration=iteration, bytes_held=run.state_bytes)
        clock.sleep(rng.uniform(0.0, 0.2) * run.phase_s)
        worker.state = replace(worker.state, phase="training")
        self._ledger.note_trained(run.id, iteration)
        hangs = self._timeline.now_s < history.calm_at_s and rng.random() < history.hangs
        clock.sleep(HANG_S if hangs else rng.uniform(0.7, 1.3) * run.phase_s)
        worker.state = replace(worker.state, phase="parking")
        clock.sleep(rng.uniform(0.2, 2.0))
        mine = Manifest(tensors={}, objects={}, metadata={"version": iteration + 1, "from": digest, "by": name})
        self._publish(worker, run, store, iteration, mine)

    def _publish(
        self, worker: _Worker, run: AdmittedRun, store: ObjectStore, iteration: int, mine: Manifest | None
    ) -> None:
        """Publish the checkpoint and the weights, each unless another host's is there."""
        digest = None if mine is None else mine.digest
        worker.state = replace(worker.state, phase="publishing", digest=digest, bytes_held=run.state_bytes)
        self._ledger.note_freed(self._host.name, run.id)
        rng, clock = random.Random(f"publication {run.id} {iteration} {digest}"), self._host.clock
        clock.sleep(rng.uniform(0.5, 10.0))
        folder = layout.checkpoint(iteration + 1)
        if mine is not None:
            patient(clock, lambda: records.commit(store, layout.manifest(folder), mine))
        stored = patient(clock, lambda: read_manifest(store, folder))
        clock.sleep(rng.uniform(0.2, 3.0))
        weights = Manifest(tensors={}, objects={}, metadata={"version": iteration + 1, "checkpoint": stored.digest})
        patient(clock, lambda: records.commit(store, layout.manifest(layout.weights(iteration + 1)), weights))
        worker.state = replace(worker.state, phase="parked")


def patient(clock: Clock, request: Callable[[], Result]) -> Result:
    """The result of a request that may be repeated; raises the StorageError of the last of TRIES."""
    for tries in range(1, TRIES + 1):
        try:
            return request()
        except (StoreUnavailable, StoreDenied):
            if tries == TRIES:
                raise
            clock.sleep(3.0 * tries)
    raise AssertionError("the last try returned nothing")
