"""Who pays for a host's seconds: pure. Every second of a host is billed once.

A run pays for its phases, each with the switch before and the parking after, and for a member that generates for the
run. Idle time is divided by share among the runs that were seated on the host; without a seated run the fleet pays.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from storage.fleet.spent_records import SpentEntry, SpentKind, SpentRecord

# Seconds by kind, of each run by id; None: of the fleet.
Bill = dict[str | None, dict[SpentKind, float]]


def bill(spent: Sequence[SpentRecord], lived_s: float, shares: Mapping[str, float]) -> Bill:
    """Returns the seconds of a host that each run has to pay for; the sum is the host's lifetime.

    Args:
        spent: All records of the host, in order.
        lived_s: The host's lifetime by the last heartbeat, seconds; time after the last record counts as idle.
        shares: The share of every run that was ever seated, by id; 1 for a missing run.

    Raises ValueError if the records leave out a second or count a second twice.
    """
    parts: dict[str | None, dict[SpentKind, list[float]]] = {}
    ended_s, seated = 0.0, tuple[str, ...]()
    for sequence, record in enumerate(spent):
        if record.sequence != sequence:
            raise ValueError(f"host {record.host}: record {record.sequence} after {sequence} records")
        seated = record.seated
        for entry in record.entries:
            if entry.began_s != ended_s or entry.ended_s <= entry.began_s:
                raise ValueError(f"host {record.host}: an entry from {entry.began_s} to {entry.ended_s} at {ended_s}")
            ended_s = entry.ended_s
            for run, part in payers(entry.run, seated, shares):
                parts.setdefault(run, {}).setdefault(entry.kind, []).append(part * entry.seconds)
    if lived_s > ended_s:
        for run, part in payers(None, seated, shares):
            parts.setdefault(run, {}).setdefault("idle", []).append(part * (lived_s - ended_s))
    return {run: {kind: math.fsum(each) for kind, each in kinds.items()} for run, kinds in parts.items()}


def without_gaps(spent: Sequence[SpentRecord]) -> tuple[list[SpentRecord], list[SpentRecord]]:
    """Divide a host's readable records into records that can be billed, and unfit records.

    Among the billable records, a gap left by an unreadable record becomes idle time of no run. A record is unfit if
    its entries do not follow on each other, or begin before the end of the preceding records.
    """
    whole, unfit = list[SpentRecord](), list[SpentRecord]()
    ended_s = 0.0
    for record in spent:
        moments = [moment for entry in record.entries for moment in (entry.began_s, entry.ended_s)]
        follow = all(before.ended_s == after.began_s for before, after in pairwise(record.entries))
        if not moments or moments[0] < ended_s or not follow or any(each.seconds <= 0 for each in record.entries):
            unfit.append(record)
            continue
        if moments[0] > ended_s:
            gap = SpentEntry(kind="idle", run=None, iteration=None, began_s=ended_s, ended_s=moments[0])
            whole.append(SpentRecord(host=record.host, sequence=len(whole), entries=(gap,), seated=()))
        whole.append(replace(record, sequence=len(whole)))
        ended_s = moments[-1]
    return whole, unfit


def total_s(billed: Bill) -> float:
    """All seconds of a bill."""
    return math.fsum(seconds for kinds in billed.values() for seconds in kinds.values())


def payers(run: str | None, seated: Sequence[str], shares: Mapping[str, float]) -> list[tuple[str | None, float]]:
    """The payers of a run's time, or (run None) of idle time, each with a part between 0 and 1."""
    if run is not None:
        return [(run, 1.0)]
    weights = {each: shares.get(each, 1.0) for each in seated}
    whole = math.fsum(weights.values())
    return [(each, weight / whole) for each, weight in weights.items()] or [(None, 1.0)]
