"""When a run's phase is due: read from the run's own directory, with one request if nothing is due."""

from collections.abc import Callable
from dataclasses import dataclass

from storage.fleet.fleet_records import AdmittedRun, DueRecord
from storage.fleet.phase_failure import fail_phase, phase_failure
from storage.package_version import VERSION
from storage.records import layout, records
from storage.records.run import exists, holds_run, next_iteration
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore

OpenStore = Callable[[str], ObjectStore]


def read_due(store: ObjectStore, iteration: int) -> DueRecord | None:
    """The record that the phase of an iteration may begin; None if the record is absent. Raises CorruptObject."""
    key = layout.due(iteration)
    try:
        record = records.read(store, DueRecord, key)
    except ObjectMissing:
        return None
    if record.iteration != iteration:
        raise CorruptObject(key, f"it is of iteration {record.iteration}")
    return record


def other_version(of_host: str, of_run: str) -> str:
    """The message about a host and a run of different package versions."""
    return f"has Gleaner {of_host}, the run {of_run}; allowed: the same; end the host and start one of {of_run}"


class PhasePoller:
    """A host's view of one run. The poller remembers the first iteration without published weights."""

    def __init__(self, run: AdmittedRun, open_store: OpenStore) -> None:
        """open_store: connects to the store at a url."""
        self.run = run
        self._open_store = open_store
        self._store: ObjectStore | None = None
        self._iteration: int | None = None
        self._planned: int | None = None

    @property
    def planned(self) -> int | None:
        """The next iteration to train, if planned as of the last look: the state of the run can be read ahead."""
        return self._planned if self._planned == self._iteration else None

    def look_for_plan(self) -> None:
        """Look whether the next iteration to train is planned, with at most one request."""
        if self._store is not None and self._iteration is not None and self.planned is None:
            self._planned = self._iteration if exists(self._store, layout.plan(self._iteration)) else None

    def unfinished(self, count: Callable[[ObjectStore, int], float]) -> float:
        """The result of `count` for the run's store and the next iteration to train; 0 if no iteration is known."""
        if self._store is None or self._iteration is None:
            return 0.0
        return count(self._store, self._iteration)

    def fail(self, iteration: int, message: str) -> None:
        """Record that no attempt at the iteration's phase succeeds; raises what the store raises."""
        assert self._store is not None, f"run {self.run.id} was never looked at"
        fail_phase(self._store, iteration, message)

    def due(self) -> int | None:
        """The iteration whose phase is due; None if no phase is due, or if the run does not exist yet.

        A phase that has failed for good is due again when a later execution advances the run. A due record of a
        different package version fails the phase at once.

        Raises the errors of `connect` and of the store.
        """
        if self._store is None:
            self._store = self._open_store(self.run.run_url)
        store = self._store
        if self._iteration is None:
            if not holds_run(store):
                return None
            self._iteration = next_iteration(store)
        while (record := read_due(store, self._iteration)) is not None:
            if exists(store, layout.manifest(layout.weights(self._iteration + 1))):
                self._iteration += 1
            elif exists(store, layout.report(self._iteration)):
                # The weights are gone again: this view is old.
                self._iteration = max(self._iteration + 1, next_iteration(store))
            elif phase_failure(store, self._iteration) is not None:
                return None
            elif record.version != VERSION:
                fail_phase(store, self._iteration, f"its host {other_version(VERSION, record.version)}")
                return None
            else:
                return self._iteration
        return None


@dataclass(slots=True)
class ServedRun:
    """A run of a host: seated there, or no longer seated and with a worker still to end. Times are the host's seconds.

    Attributes:
        run: The run as admitted.
        poller: Polls the run's directory.
        due: The due iteration, and the time since when; None if no phase is known to be due.
        begun_s: The beginning of the last phase.
        publishes_since_s: The beginning of the publication under way, or None.
        prefetches_since_s: The beginning of the read ahead under way, or None.
        pause_s: Seconds of the last pause after an error; 0 after a success.
        paused_until_s: The host does not look at the run before this time.
    """

    run: AdmittedRun
    poller: PhasePoller
    due: tuple[int, float] | None = None
    begun_s: float = 0.0
    publishes_since_s: float | None = None
    prefetches_since_s: float | None = None
    pause_s: float = 0.0
    paused_until_s: float = 0.0
