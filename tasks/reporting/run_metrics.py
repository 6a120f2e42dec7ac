"""The metrics of a run for Prometheus, look by look: what `gleaner watch` sees, and what the reports add up to."""

from collections.abc import Iterator
from dataclasses import replace

from storage.clock import Clock
from storage.records.run import read_report
from storage.stores.store import ObjectMissing, ObjectStore, StoreUnavailable
from tasks.reporting.crew_view import RunView
from tasks.reporting.exposition import SUMS, Committed, exposition
from tasks.reporting.watch import Watcher


class RunMetrics:
    """Looks at a run as `gleaner watch` does. A report is read once; a counter therefore never goes back."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._watcher = Watcher(store, clock)
        self._committed = Committed(sums={}, newest={})
        self._progress: tuple[object, ...] = ()
        self._progress_since_s = 0.0

    def look(self) -> str:
        """The metrics now; raises what `Watcher.look` does."""
        return self._expose(self._watcher.look())

    def looks(self, interval_s: float) -> Iterator[str]:
        """Looks without end. If the store does not answer, they show the last state, and say so."""
        return map(self._expose, self._watcher.looks(interval_s))

    def _expose(self, view: RunView) -> str:
        try:
            self._read_reports()
        except StoreUnavailable as error:
            view = replace(view, notice=str(error))
        totals, now_s = view.totals, self._clock.monotonic()
        progress = (view.iteration, view.phase, totals.responses_done, totals.tokens, totals.micro_batches)
        if progress != self._progress:
            self._progress, self._progress_since_s = progress, now_s
        return exposition(view, self._committed, now_s - self._progress_since_s)

    def _read_reports(self) -> None:
        while True:
            known = self._committed
            try:
                metrics = read_report(self._store, known.iterations).metrics
            except ObjectMissing:
                return
            sums = {name: known.sums.get(name, 0.0) + metrics.get(metric, 0.0) for name, (metric, _) in SUMS.items()}
            self._committed = Committed(iterations=known.iterations + 1, sums=sums, newest=metrics)
