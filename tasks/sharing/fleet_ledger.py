"""The use of a fleet's hosts by each run, beside the use that each run would have with a trainer of its own.

Hours and dollars count hosts alone; rollouts are in the reports of the runs. `billing` divides a host's seconds; the
ledger turns seconds into hours and dollars.
"""

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

from storage.fleet.fleet_records import AdmittedRun, HostBeat, HostRecord
from storage.fleet.spent_records import RestoredState, SpentRecord, Tier
from storage.records.records import ReportRecord
from storage.records.run import holds_run, reports
from storage.stores.connect import connect
from storage.stores.store import StorageError
from tasks.sharing.billing import Bill, bill
from tasks.sharing.shared_cycles import saving_bound

log = logging.getLogger(__name__)
SECONDS_PER_HOUR = 3600.0
# Below this part of all GPU-hours, the waits between runs cost as much as sharing can save.
BOUND_SMALL = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAccount:
    """A host's bill. `hours` and `usd` cover the host's whole life; `usd` is None if the price is unknown.

    Attributes:
        incarnation: The host's incarnation.
        machine: The name of the machine.
        is_gone: The last heartbeat is "gone".
        usd_per_hour: The price of the machine; None: unknown.
        run_hours: Hours by paying run id; None: hours that the fleet pays.
        restored: The states that the host restored, in order.
    """

    incarnation: str
    machine: str
    is_gone: bool
    usd_per_hour: float | None
    run_hours: Mapping[str | None, float]
    restored: Sequence[RestoredState] = ()

    @property
    def hours(self) -> float:
        return math.fsum(self.run_hours.values())

    @property
    def usd(self) -> float | None:
        return None if self.usd_per_hour is None else self.hours * self.usd_per_hour

    def usd_of(self, run: str | None) -> float | None:
        """Dollars that the run has to pay for the host; None if the price is unknown."""
        return None if self.usd_per_hour is None else self.run_hours.get(run, 0.0) * self.usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAccount:
    """The states that a host has read from a tier.

    Attributes:
        tier: The source of the states.
        phases: States read onto the device at the beginning of a phase.
        ahead: States read into host memory ahead of a phase.
        seconds: Seconds of all reads together.
        num_bytes: Bytes of all reads together.
    """

    tier: Tier
    phases: int
    ahead: int
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """The use of a fleet by one run. None: unknown, because the reports of the run cannot be read or do not suffice.

    Attributes:
        id: The run's id in the fleet.
        name: The run's url, or the id for a run of a different team.
        hours: Hours of hosts.
        usd: Dollars for hosts; None if a host has no price.
        iterations: Iterations with a report.
        isolated_hours: Hours of a trainer of its own, held for all cycles of the reported iterations.
        slowdown: The median cycle over the admitted cycle.
        predicted: The slowdown that admission predicted.
        warm: Phases (of `phases`) whose state was in host memory.
        phases: Phases whose state was restored.
        ranks: Devices that the run has in each hour.
    """

    id: str
    name: str
    hours: float
    usd: float | None
    iterations: int | None
    isolated_hours: float | None
    slowdown: float | None
    predicted: float | None
    warm: int
    phases: int
    ranks: int

    @property
    def device_hours_per_step(self) -> float | None:
        """Device hours of an iteration: hours times devices, as GPU-hours are counted."""
        return self.ranks * self.hours / self.iterations if self.iterations else None

    @property
    def isolated_device_hours_per_step(self) -> float | None:
        """Device hours of an iteration with a trainer of its own."""
        if not self.iterations or self.isolated_hours is None:
            return None
        return self.ranks * self.isolated_hours / self.iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """The account of a fleet.

    Attributes:
        url: The fleet's url.
        bound: The greatest share of all GPU-hours that sharing can save; None if no run has GPUs.
        hosts: The bill of each host.
        runs: The use by each run.
        damaged: A line for each record of the fleet that cannot be read.
    """

    url: str
    bound: float | None
    hosts: Sequence[HostAccount]
    runs: Sequence[RunAccount]
    damaged: Sequence[str] = ()

    def name_of(self, run: str | None) -> str:
        """The displayed name of a payer: the run's name, or for None the fleet, which pays while no run is seated."""
        if run is None:
            return "the fleet"
        return next((each.name for each in self.runs if each.id == run), run)

    @property
    def verdict(self) -> str:
        """The bound in words."""
        if self.bound is None:
            return "The bound on what sharing saves is unknown, because no run has GPUs in its configuration."
        return f"{bound_in_words(self.bound)}."


def bound_in_words(bound: float) -> str:
    """A bound as advice to share or not."""
    most = f"at most {100 * bound:.1f} % of all GPU-hours"
    return f"Do not share: it saves {most}" if bound < BOUND_SMALL else f"Sharing saves {most}"


def measured_cycle_s(found: Sequence[ReportRecord]) -> float | None:
    """The median seconds between consecutive reports, or the duration of a single iteration; None without reports.

    In a run with rollouts ahead an iteration takes longer than a cycle, because two iterations overlap.
    """
    moments = [report.created_at_s for report in found if math.isfinite(report.created_at_s)]
    between_s = [later - sooner for sooner, later in pairwise(moments) if later > sooner]
    if between_s:
        return statistics.median(between_s)
    return found[0].metrics.get("timing_s/iteration") if found else None


def host_account(
    host: HostRecord, beat: HostBeat | None, spent: Sequence[SpentRecord], shares: Mapping[str, float]
) -> HostAccount:
    """Turn a host's records into an account; raises ValueError if the records miss a second or count a second twice."""
    billed: Bill = bill(spent, 0.0 if beat is None else beat.lived_s, shares)
    return HostAccount(
        incarnation=host.incarnation,
        machine=host.machine,
        is_gone=beat is not None and beat.state == "gone",
        usd_per_hour=host.usd_per_hour,
        run_hours={run: math.fsum(kinds.values()) / SECONDS_PER_HOUR for run, kinds in billed.items()},
        restored=[each for record in spent for each in record.restored],
    )


def tier_accounts(restored: Sequence[RestoredState]) -> list[TierAccount]:
    """The account of each tier with reads, the nearest tier first."""
    found = []
    for tier in get_args(Tier):
        here = [each for each in restored if each.tier == tier]
        if here:
            ahead = sum(each.ahead for each in here)
            found.append(
                TierAccount(
                    tier=tier,
                    phases=len(here) - ahead,
                    ahead=ahead,
                    seconds=math.fsum(each.seconds for each in here),
                    num_bytes=sum(each.num_bytes for each in here),
                )
            )
    return found


def predicted_slowdowns(runs: Iterable[AdmittedRun]) -> dict[str, float]:
    """The slowdown of each run by the latest admission with a prediction for the run, by run id."""
    admissions = sorted(runs, key=lambda run: run.admitted_at_s)
    return {
        run: slowdown for each in admissions if each.predicted for run, slowdown in each.predicted.slowdowns.items()
    }


def run_account(
    run: AdmittedRun,
    name: str,
    hosts: Sequence[HostAccount],
    found: Sequence[ReportRecord] | None,
    predicted: float | None = None,
) -> RunAccount:
    """The use of the hosts by one run. found: the reports of the run; None if unreadable."""
    using = [host for host in hosts if run.id in host.run_hours]
    usd = [part for host in using if (part := host.usd_of(run.id)) is not None]
    cycle_s = None if not found or len(found) < 2 else measured_cycle_s(found)
    begun = [each for host in hosts for each in host.restored if each.run == run.id and not each.ahead]
    return RunAccount(
        id=run.id,
        name=name,
        hours=math.fsum(host.run_hours[run.id] for host in using),
        usd=math.fsum(usd) if len(usd) == len(using) else None,
        iterations=None if found is None else len(found),
        isolated_hours=None if found is None else len(found) * run.cycle_s / SECONDS_PER_HOUR,
        slowdown=None if cycle_s is None else cycle_s / run.cycle_s,
        predicted=predicted,
        warm=sum(each.tier == "host memory" for each in begun),
        phases=len(begun),
        ranks=run.ranks,
    )


def bound_of(runs: Sequence[AdmittedRun], hosts: int) -> float | None:
    """The bound for alike runs of mean size, divided evenly among the hosts; None if no run has GPUs."""
    if not any(run.trainer_gpus for run in runs):
        return None
    per_host = max(1.0, len(runs) / max(1, hosts))
    rollout_gpus = statistics.fmean(run.rollout_gpus for run in runs)
    return saving_bound(per_host, rollout_gpus, statistics.fmean(run.trainer_gpus for run in runs))


def readable_reports(run: AdmittedRun) -> list[ReportRecord] | None:
    """The reports of a run; None if the directory cannot be read, such as a directory of a different team."""
    try:
        store = connect(run.run_url)
        return reports(store) if holds_run(store) else []
    except (StorageError, OSError, ValueError, LookupError) as error:
        # The message could name what is not the reader's.
        log.warning("run %s: its reports cannot be read: %s", run.id, type(error).__name__)
        return None
