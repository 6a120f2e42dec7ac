"""Who pays for a host's seconds: pure. Every second of a host is billed once.

The time of a phase, with the switch to it and the parking after it, is its run's, and so is that of a member that
generates for a run. Idle time is divided by share among the runs that were seated on the host then; if none was, it
stays with the fleet.
"""

import math
from collections.abc import Mapping, Sequence

from storage.fleet_records import SpentKind, SpentRecord

# Seconds by kind, of each run by id; None: of the fleet.
Bill = dict[str | None, dict[SpentKind, float]]


def bill(spent: Sequence[SpentRecord], lived_s: float, shares: Mapping[str, float]) -> Bill:
    """Returns the seconds of a host that each run has to pay for; they add up to the host's lifetime.

    spent: all records of the host, in order. lived_s: how long it lived, by its last heartbeat; what a host that was
    lost had not recorded counts as idle. shares: of every run that was ever seated, by id. Raises ValueError if the
    records leave out a second or have one twice.
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


def total_s(billed: Bill) -> float:
    """All seconds of a bill."""
    return math.fsum(seconds for kinds in billed.values() for seconds in kinds.values())


def payers(run: str | None, seated: Sequence[str], shares: Mapping[str, float]) -> list[tuple[str | None, float]]:
    """Who pays for time of this run, or for idle time, and which part each."""
    if run is not None:
        return [(run, 1.0)]
    whole = math.fsum(shares[each] for each in seated)
    return [(each, shares[each] / whole) for each in seated] or [(None, 1.0)]
