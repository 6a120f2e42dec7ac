"""The seconds of a host by kind: consecutive entries from the host's beginning to its end, written as records.

Each entry begins at the very number at which the previous entry ends, so no second is missing or counted twice.
"""

import logging
from collections import deque
from collections.abc import Iterable

from resources.work_log import at_work
from storage.fleet import fleet_layout
from storage.fleet.spent_records import RestoredState, SpentEntry, SpentKind, SpentRecord
from storage.records import records
from storage.stores.store import ObjectStore
from tasks.sharing.workers import Restored, WorkerPhase

log = logging.getLogger(__name__)

KINDS: dict[WorkerPhase, SpentKind] = {
    "restoring": "switch",
    "replaying": "switch",
    "waiting": "wait",
    "training": "train",
    "parking": "park",
}
DOINGS: dict[SpentKind, str] = {
    "switch": "restoring the state",
    "wait": "waiting for groups to be recorded",
    "train": "training",
    "park": "parking the state",
    "backfill": "while no phase is due, a member generates responses",
    "idle": "waiting for a phase that is due",
}


class Spending:
    """The entries of one incarnation of a host; times are seconds since it began."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._kind: SpentKind = "idle"
        self._phase: tuple[str | None, int | None] = (None, None)
        self._since_s = 0.0
        self._entries: list[SpentEntry] = []
        self._restored: list[RestoredState] = []
        self._records = 0
        self._unwritten: deque[SpentRecord] = deque()

    @property
    def is_written(self) -> bool:
        """Whether every record is written."""
        return not self._unwritten

    def note(self, kind: SpentKind, run: str | None, iteration: int | None, now_s: float) -> None:
        """From `now_s` on, the host's time is of this kind, run and iteration."""
        if (kind, (run, iteration)) != (self._kind, self._phase):
            self._close(now_s)
            self._kind, self._phase = kind, (run, iteration)
            of_run = f" of run {run}" if run else ""
            at_work(f"{DOINGS[kind]}{of_run}" + ("" if iteration is None else f", iteration {iteration}"))

    def note_restored(self, run: str, iteration: int, how: Restored) -> None:
        """Note that a worker has restored the run's state for an iteration."""
        self._restored.append(
            RestoredState(
                run=run,
                iteration=iteration,
                tier=how.tier,
                ahead=how.ahead,
                seconds=how.seconds,
                num_bytes=how.num_bytes,
            )
        )

    def record(self, seated: Iterable[str], now_s: float) -> None:
        """Make a record of the time since the last record. seated: the runs seated on the host all that time."""
        self._close(now_s)
        if self._entries:
            record = SpentRecord(
                host=self._host,
                sequence=self._records,
                entries=tuple(self._entries),
                seated=tuple(sorted(seated)),
                restored=tuple(self._restored),
            )
            self._unwritten.append(record)
            self._records += 1
            self._entries, self._restored = [], []

    def write(self, store: ObjectStore) -> None:
        """Write the records in order; after an error of the store the next call repeats the unwritten bytes."""
        while self._unwritten:
            record = self._unwritten[0]
            key = fleet_layout.spent(record.host, record.sequence)
            if not records.commit(store, key, record):
                log.error("%s holds another record; what this host spent then is lost", key)
            self._unwritten.popleft()

    def _close(self, now_s: float) -> None:
        """End the present entry."""
        if now_s > self._since_s:
            run, iteration = self._phase
            entry = SpentEntry(kind=self._kind, run=run, iteration=iteration, began_s=self._since_s, ended_s=now_s)
            self._entries.append(entry)
            self._since_s = now_s
