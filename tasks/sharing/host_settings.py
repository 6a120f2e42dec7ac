"""Intervals and limits of a host."""

from dataclasses import dataclass

from storage.fleet.fleet_records import AdmittedRun


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Intervals and limits; seconds are on the host's own clock.

    Attributes:
        poll_interval_s: Seconds between two looks at due phases and workers.
        look_interval_s: Seconds between two looks at the fleet.
        spent_interval_s: Seconds between two records of spent time.
        hours: The host ends at the first phase boundary after this many hours. None: no limit.
        overtime: A worker may hold the device for this multiple of the expected seconds of a phase, publish for as
            long, and read ahead for as long; then the host kills the worker.
        overtime_s_min: The limit of `overtime` is at least this many seconds.
        backfill_s: A member generates on the device while no phase is expected for this many seconds. None: no member.
        notice_s: Seconds from the notice to a member until the host kills the member.
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
