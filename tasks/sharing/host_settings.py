"""How a host goes about its work."""

from dataclasses import dataclass

from storage.fleet.fleet_records import AdmittedRun


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Seconds are on the host's own clock.

    poll_interval_s: between two looks at what is due. look_interval_s: between two looks at the fleet.
    spent_interval_s: between two records of what was spent. hours: it ends at the first phase boundary after so many;
    None: it does not. overtime: a phase may hold the device for so many times its expectation, and at least for
    overtime_s_min; then it is killed. The same holds for its publication. backfill_s: while no phase is expected for
    so long, a member generates on the device; None: none does. notice_s: after a notice it is killed after so long.
    """

    poll_interval_s: float = 1.0
    look_interval_s: float = 10.0
    spent_interval_s: float = 60.0
    hours: float | None = None
    overtime: float = 5.0
    overtime_s_min: float = 120.0
    backfill_s: float | None = None
    notice_s: float = 60.0

    def __post_init__(self) -> None:
        if self.backfill_s is not None and self.backfill_s <= 0:
            raise ValueError(f"backfill_s: value {self.backfill_s}; allowed: above 0, or none")

    def limit_s(self, run: AdmittedRun) -> float:
        """The longest time that a phase of the run may take."""
        return max(self.overtime_s_min, self.overtime * run.phase_s)
