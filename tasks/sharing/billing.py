"""Who pays for a host's seconds: pure. Every second of a host is billed once.

The time of a phase, with the switch to it and the parking after it, is its run's, and so is that of a member that
generates for a run. Idle time is divided by share among the runs that were seated on the host then; if none was, it
stays with the fleet.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from storage.fleet.spent_records import SpentEntry, SpentKind, SpentRecord

# Seconds by kind, of each run by id; None: of the fleet.
Bill = dict[str | None, dict[SpentKind, float]]


def bill(spent: Sequence[SpentRecord], lived_s: float, shares: Mapping[str, float]) -> Bill:
    """Returns the seconds of a host that each run has to pay for; they add up to the host's lifetime.

    spent: all records of the host, in order. lived_s: how long it lived, by its last heartbeat; what a host that was
    lost had not recorded counts as idle. shares: of every run that was ever seated, by id; 1 for one that
    is missing. Raises ValueError if the records leave out a second or have one twice.
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
    """The records that can be billed, of those of a host that can be read, and those that cannot.

    In the first, what records that cannot be read have left out is idle time of no run. The others are those whose
    times do not follow on each other, or begin before those of the records before have ended.
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
    """Who pays for time of this run, or for idle time, and which part each."""
    if run is not None:
        return [(run, 1.0)]
    weights = {each: shares.get(each, 1.0) for each in seated}
    whole = math.fsum(weights.values())
    return [(each, weight / whole) for each, weight in weights.items()] or [(None, 1.0)]
