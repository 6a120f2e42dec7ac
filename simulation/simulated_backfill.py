"""The member that generates on a simulated host: it has the device, leaves at a notice, hangs, and ends by itself."""

import random

from simulation.ledger_of_fleet import LedgerOfFleet
from simulation.virtual_time import Timeline

# Of members; one that hangs ignores its notice, one that breaks ends by itself.
HANGS, BREAKS = 0.05, 0.1


class SimulatedBackfill:
    """BackfillMember in virtual time, as events on the timeline. run_ids: of the runs, by their urls."""

    def __init__(
        self, timeline: Timeline, ledger: LedgerOfFleet, host: str, rng: random.Random, run_ids: dict[str, str]
    ) -> None:
        self._timeline = timeline
        self._ledger = ledger
        self._host = host
        self._rng = rng
        self._run_ids = run_ids
        self._run: str | None = None
        self._started = 0
        self._hangs = False

    @property
    def is_running(self) -> bool:
        return self._run is not None

    def start(self, run_url: str) -> None:
        self._run = self._run_ids[run_url]
        self._started += 1
        self._ledger.note_helped(self._host, self._run)
        self._hangs = self._rng.random() < HANGS
        if self._rng.random() < BREAKS:
            self._end_after(self._rng.uniform(1, 30))

    def notice(self) -> None:
        if not self._hangs:
            self._end_after(self._rng.uniform(0.5, 8.0))

    def kill(self) -> None:
        self._end(self._started)

    def _end_after(self, delay_s: float) -> None:
        started = self._started
        self._timeline.after(delay_s, lambda: self._end(started))

    def _end(self, started: int) -> None:
        """That member has ended, unless it had before."""
        if started == self._started and self._run is not None:
            self._ledger.note_left(self._host, self._run)
            self._run = None
