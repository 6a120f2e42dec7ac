"""Which due run has the device next: pure.

A run that waited long for its size goes first: highest response ratio next, weighted by share. The exception is a run
that would exceed its bound while the phase chosen so is trained. No phase is interrupted, so this decides only between
phases.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DueRun:
    """A run whose phase is due. waited_s: since then. expected_s: of the phase. wait_s_max: how long it may wait."""

    id: str
    waited_s: float
    expected_s: float
    wait_s_max: float
    share: float = 1.0

    @property
    def ratio(self) -> float:
        """The response ratio that the run has if it begins now, times its share."""
        return (self.waited_s + self.expected_s) / self.expected_s * self.share

    @property
    def spare_s(self) -> float:
        """How much longer it may wait; negative if it has waited for too long."""
        return self.wait_s_max - self.waited_s


def next_run(due: Sequence[DueRun]) -> DueRun | None:
    """The run that is to train next; None if none is due. Ties are decided by id.

    Of the run with the greatest ratio and those that could not wait for its phase to end, the one with the least time
    to spare. Time to spare only falls, so no run is passed over for ever.
    """
    if not due:
        return None
    chosen = min(due, key=lambda run: (-run.ratio, run.id))
    late = [run for run in due if run is not chosen and run.spare_s < chosen.expected_s]
    return min((chosen, *late), key=lambda run: (run.spare_s, run.id))
