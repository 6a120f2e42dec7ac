"""Which due run has the device next: pure.

A run that has waited long relative to the length of its phase goes first: highest response ratio next, weighted by
share. Exception: a run whose maximum wait would pass during the chosen phase goes first. Phases are never interrupted;
the order decides only between phases.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DueRun:
    """A run whose phase is due.

    Attributes:
        id: The run's id in the fleet.
        waited_s: Seconds since the phase fell due.
        expected_s: Expected seconds of the phase.
        wait_s_max: The longest wait that keeps the run within the fleet's `slowdown_max`, seconds.
        share: The weight of the run's waiting.
    """

    id: str
    waited_s: float
    expected_s: float
    wait_s_max: float
    share: float = 1.0

    @property
    def ratio(self) -> float:
        """The response ratio of a beginning now (wait and phase over phase), times the share."""
        return (self.waited_s + self.expected_s) / self.expected_s * self.share

    @property
    def spare_s(self) -> float:
        """Seconds that the run may still wait; negative after `wait_s_max`."""
        return self.wait_s_max - self.waited_s


def next_run(due: Sequence[DueRun]) -> DueRun | None:
    """The run to train next; None if no run is due. Ties are decided by id.

    Candidates are the run with the greatest ratio, and every run whose `spare_s` ends during the phase of that run; the
    candidate with the least `spare_s` is next. `spare_s` only falls, so no run is passed over for ever.
    """
    if not due:
        return None
    chosen = min(due, key=lambda run: (-run.ratio, run.id))
    late = [run for run in due if run is not chosen and run.spare_s < chosen.expected_s]
    return min((chosen, *late), key=lambda run: (run.spare_s, run.id))
