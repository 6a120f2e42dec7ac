"""The workers of a simulated host: they restore, train, park and publish in drawn times, read ahead, hang, and die.

A worker goes by production's rule of which resident state it may use. What it trains is a function of nothing but where
it came from, so every computation of a phase has a digest of its own, as if its last bits differed.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from simulation.ledger_of_fleet import LedgerOfFleet
from simulation.simulated_fleet_history import FleetHistory
from simulation.simulated_session import Machine
from simulation.virtual_time import ROUNDING_S, Process, Timeline
from storage.clock import Clock
from storage.fleet.fleet_records import AdmittedRun
from storage.records import layout, records
from storage.records.run import is_trained
from storage.stores.faults import Crashed
from storage.stores.store import ObjectMissing, ObjectStore, StorageError, StoreDenied, StoreUnavailable
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.stored_versions import restored_from
from storage.weights.tensor_sets import pull_some, read_manifest, write_object
from tasks.sharing import residents
from tasks.sharing.workers import ON_DEVICE, Restored, WorkerPhase, WorkerState

# Longer than any phase may take before it is killed.
HANG_S = 500.0
TRIES = 4
TENSOR = "state"
Result = TypeVar("Result")


class _Worker:
    """A worker's process of the present phase, and what it does. ended: whether it was ended from outside.

    note: called with what it did on the device, and since when, when it does something else.
    """

    def __init__(
        self, state: WorkerState, now: Callable[[], float], note: Callable[[WorkerPhase, float], None]
    ) -> None:
        self._state = state
        self._now = now
        self._note = note
        self._since_s = now()
        self.process: Process | None = None
        self.ended = False

    @property
    def state(self) -> WorkerState:
        return self._state

    @state.setter
    def state(self, state: WorkerState) -> None:
        before, self._state = self._state.phase, state
        if before != state.phase:
            if before in ON_DEVICE:
                self._note(before, self._since_s)
            self._since_s = self._now()


class SimulatedWorkers:
    """PhaseWorkers in virtual time.

    connect: returns the store of a run, from its url and the name of a process of this host. memory_bytes: room for the
    states of all workers that are not at work.
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
        # When the last phase of a run failed, by the host's clock; until the next one begins.
        self._failed_s: dict[str, float] = {}
        self._begun = 0

    def begin(self, run: AdmittedRun, iteration: int) -> None:
        if self.state(run.id).phase == "prefetching":
            self._ledger.breaks(f"error: {self._host.name} begins {run.id}, which reads its state ahead")
        self._ledger.note_begun(self._host.name, run.id, iteration)
        self._check_pause(run.id)
        worker = self._worker(run.id)
        worker.state = replace(worker.state, phase="restoring", iteration=iteration, restored=None)
        self._check_memory(run)
        self._start(worker, run, lambda name: self._work(worker, run, iteration, name))

    def prefetch(self, run: AdmittedRun, iteration: int) -> None:
        worker = self._worker(run.id)
        worker.state = replace(worker.state, phase="prefetching", iteration=iteration, restored=None)
        self._check_memory(run)
        self._start(worker, run, lambda name: self._read_ahead(worker, run, iteration, name))

    def _worker(self, run_id: str) -> _Worker:
        if run_id not in self._workers:
            note = partial(self._ledger.note_stage, self._host.name, run_id)
            self._workers[run_id] = _Worker(WorkerState(), self._ledger.now, note)
        return self._workers[run_id]

    def _start(self, worker: _Worker, run: AdmittedRun, work: Callable[[str], None]) -> None:
        self._begun += 1
        name = f"{self._host.name}/{self._begun}"
        process = Process(
            self._timeline, name, lambda _: work(name), lambda _, error: self._ended(worker, run.id, error)
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
        if sum(run.state_bytes for run in self._history.runs) <= self._memory_bytes:
            self._ledger.check_dropped(self._host.name, run_id)
        self._end(run_id)
        self._workers.pop(run_id, None)
        self._failed_s.pop(run_id, None)

    def kill(self, run_id: str) -> None:
        if self.state(run_id).is_busy:
            self._failed_s[run_id] = self._host.clock.monotonic()
        self._end(run_id)
        self._workers.pop(run_id, None)
        self._worker(run_id).state = WorkerState(phase="failed", message="killed")

    def strike(self, rng: random.Random) -> None:
        """Let a random worker die among the workers at work."""
        busy = sorted(run for run, worker in self._workers.items() if worker.state.is_busy)
        if busy:
            self.kill(rng.choice(busy))

    def _check_pause(self, run_id: str) -> None:
        """Check that a run whose phase has failed is left alone before it is begun again."""
        now_s = self._host.clock.monotonic()
        pause_s = now_s - self._failed_s.pop(run_id, -math.inf)
        if pause_s < self._history.poll_interval_s - ROUNDING_S:
            self._ledger.breaks(f"hasty: {self._host.name} begins {run_id} again {pause_s} s after its phase failed")

    def _check_memory(self, run: AdmittedRun) -> None:
        others = [worker.state for name, worker in self._workers.items() if name != run.id]
        idle_bytes = sum(state.bytes_held for state in others if not state.is_busy)
        if idle_bytes and sum(state.bytes_held for state in others) + run.state_bytes > self._memory_bytes:
            self._ledger.breaks(f"memory: {self._host.name} keeps {idle_bytes} bytes of parked states beside {run.id}")

    def _end(self, run_id: str) -> None:
        """End a worker's process; requests on their way may still arrive."""
        worker = self._workers.get(run_id)
        if worker is not None:
            worker.ended = True
            self._ledger.note_over(self._host.name, run_id)
            self._ledger.note_freed(self._host.name, run_id)
            if worker.state.is_busy:
                self._ledger.note_fault("worker ended")
            worker.state = WorkerState()
            if worker.process is not None:
                self._timeline.after(0.0, worker.process.kill)

    def _ended(self, worker: _Worker, run_id: str, error: BaseException | None) -> None:
        """A phase's process has ended by itself, by a fault, or with its host."""
        if worker.ended:
            return
        self._ledger.note_over(self._host.name, run_id)
        self._ledger.note_freed(self._host.name, run_id)
        if error is not None and not self._host.dead:
            if worker.state.is_busy:
                self._failed_s[run_id] = self._host.clock.monotonic()
                self._ledger.note_fault(f"worker: {type(error).__name__}")
            worker.state = WorkerState(phase="failed", message=str(error))
            if not isinstance(error, StorageError | Crashed):
                self._ledger.breaks(f"error: a worker of {self._host.name} ended with {error!r}")

    def _work(self, worker: _Worker, run: AdmittedRun, iteration: int, name: str) -> None:
        """One phase: a function of the checkpoint, or of the resident state that equals it, or of a replay."""
        history, clock = self._history, self._host.clock
        rng = random.Random(f"phase {name} {run.id} {iteration} {history.seed}")
        store = self._connect(run.run_url, name)
        if patient(clock, lambda: is_trained(store, iteration)):
            worker.state = WorkerState(phase="parked", iteration=iteration)
            return
        stored, version = self._stored(store, iteration)
        digest, began_s = worker.state.digest, clock.monotonic()
        is_resident = residents.is_usable(digest, stored.digest)
        if is_resident:
            clock.sleep(rng.uniform(0.1, 1.0))
            took_s = clock.monotonic() - began_s
            restored = Restored(tier="host memory", seconds=took_s, num_bytes=run.state_bytes, ahead=False)
        else:
            digest = stored.digest
            restored = self._read(run, store, version, rng, ahead=False)
            if version < iteration:
                # The host that trained before died when it had published the weights, and not the checkpoint.
                self._ledger.counts["phases replayed"] += 1
                worker.state = replace(worker.state, phase="replaying", replays=iteration - version)
                clock.sleep(rng.uniform(0.7, 1.3) * run.phase_s * (iteration - version))
        self._ledger.note_state(self._host.name, run.id, iteration, digest, resident=is_resident)
        self._ledger.note_restored(self._host.name, run.id, iteration, restored)
        worker.state = WorkerState(phase="waiting", iteration=iteration, bytes_held=run.state_bytes, restored=restored)
        clock.sleep(rng.uniform(0.0, 0.2) * run.phase_s)
        worker.state = replace(worker.state, phase="training")
        self._ledger.note_trained(run.id, iteration)
        hangs = self._timeline.now_s < history.calm_at_s and rng.random() < history.hangs
        clock.sleep(HANG_S if hangs else rng.uniform(0.7, 1.3) * run.phase_s)
        worker.state = replace(worker.state, phase="parking")
        clock.sleep(rng.uniform(0.2, 2.0))
        text = f"version {iteration + 1} from {digest} by {name}".encode()
        self._publish(worker, run, store, iteration, (digest, TensorBlock("U8", (len(text),), text)))

    def _read_ahead(self, worker: _Worker, run: AdmittedRun, iteration: int, name: str) -> None:
        """Read a state into host memory; if impossible now, the phase reads the state."""
        rng, store = random.Random(f"ahead {name} {run.id} {iteration}"), self._connect(run.run_url, name)
        self._ledger.note_read_ahead(self._host.name, run.id, iteration)
        state = WorkerState(phase="parked", iteration=iteration)
        try:
            stored, version = self._stored(store, iteration)
            if version < iteration:
                raise ObjectMissing(layout.manifest(layout.checkpoint(iteration)))
            restored = self._read(run, store, version, rng, ahead=True)
            self._ledger.note_state(self._host.name, run.id, iteration, stored.digest, resident=False)
            self._ledger.note_restored(self._host.name, run.id, iteration, restored)
            state = replace(state, digest=stored.digest, bytes_held=run.state_bytes, restored=restored)
        except StorageError as error:
            self._ledger.tell(name, f"reads nothing ahead: {error!r}")
        worker.state = state

    def _stored(self, store: ObjectStore, iteration: int) -> tuple[Manifest, int]:
        """What identifies the state from which an iteration trains, and the version whose checkpoint leads to it."""
        clock = self._host.clock
        version = patient(clock, lambda: restored_from(store, iteration))
        folder = layout.checkpoint(iteration) if version == iteration else layout.weights(iteration)
        return patient(clock, lambda: read_manifest(store, folder)), version

    def _read(self, run: AdmittedRun, store: ObjectStore, version: int, rng: random.Random, *, ahead: bool) -> Restored:
        """Read a stored state."""
        clock, prefix = self._host.clock, layout.checkpoint(version)
        began_s = clock.monotonic()
        stored = patient(clock, lambda: read_manifest(store, prefix))
        patient(clock, lambda: pull_some(store, prefix, stored, list(stored.tensors)))
        clock.sleep(rng.uniform(1.0, 10.0))
        took_s = clock.monotonic() - began_s
        return Restored(tier="object store", seconds=took_s, num_bytes=run.state_bytes, ahead=ahead)

    def _publish(
        self,
        worker: _Worker,
        run: AdmittedRun,
        store: ObjectStore,
        iteration: int,
        made: tuple[str | None, TensorBlock],
    ) -> None:
        """Publish the weights, which the run needs to continue, and the checkpoint, unless a host has stored them.

        made: digest of the state behind the new state, and the content of the new state.
        """
        folder = layout.checkpoint(iteration + 1)
        part = write_object(store, folder, {TENSOR: made[1]}, upload=False)
        metadata = {"version": iteration + 1, "from": made[0]}
        mine = Manifest(tensors=part.tensors, objects=part.objects, metadata=metadata)
        digest = mine.digest
        worker.state = replace(worker.state, phase="publishing", digest=digest, bytes_held=run.state_bytes)
        self._ledger.note_freed(self._host.name, run.id)
        rng, clock = random.Random(f"publication {run.id} {iteration} {digest}"), self._host.clock
        clock.sleep(rng.uniform(0.2, 3.0))
        weights = Manifest(tensors={}, objects={}, metadata={"version": iteration + 1, "of": digest})
        patient(clock, lambda: records.commit(store, layout.manifest(layout.weights(iteration + 1)), weights))
        clock.sleep(rng.uniform(0.5, 10.0))
        patient(clock, lambda: write_object(store, folder, {TENSOR: made[1]}))
        patient(clock, lambda: records.commit(store, layout.manifest(folder), mine))
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
