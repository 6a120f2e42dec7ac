"""The checks of who pays for the seconds of a fleet's hosts, after a history's end.

Bills are made by production's rules. They are compared with the lifetimes of hosts, with what their devices did, and
with when each run was seated, which the ledger has measured.
"""

import math
from collections import defaultdict
from collections.abc import Iterator

from simulation import virtual_time
from simulation.ledger_of_fleet import FLEET, SLOWEST_CLOCK, HostLife, LedgerOfFleet, Use
from simulation.simulated_fleet_history import FleetHistory
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import HostBeat
from storage.fleet.spent_records import SpentEntry, SpentKind, SpentRecord
from storage.records import records
from storage.stores.memory import NestedStore
from tasks.sharing.billing import Bill, bill, total_s
from tasks.sharing.workers import WorkerPhase

ROUNDING_S = 1e-9
# Of sums of many times on clocks of which each counts from a zero of its own.
SUMMED_S = 1e-5
# How long the requests take that a host makes between two looks at its device, if the store is well.
NOTICED_S = 15.0
STAGES: dict[SpentKind, frozenset[WorkerPhase]] = {
    "switch": frozenset({"restoring", "replaying"}),
    "wait": frozenset({"waiting"}),
    "train": frozenset({"training"}),
    "park": frozenset({"parking"}),
}


def spent_by(ledger: LedgerOfFleet, host: str) -> list[SpentRecord]:
    """What a host has recorded of its seconds."""
    store = NestedStore(ledger.store, FLEET.removesuffix("/"))
    return [records.read(store, SpentRecord, key) for key in store.list(fleet_layout.spent_by(host))]


def noticed_s(history: FleetHistory) -> float:
    """By when a host whose store is well has noticed something about its device."""
    return history.poll_interval_s / SLOWEST_CLOCK + NOTICED_S


def check_bills(ledger: LedgerOfFleet) -> None:
    """Check that every second of every host is billed once, to those who are to pay for it."""
    shares = {run: 1.0 + number for number, run in enumerate(ledger.runs)}
    for name, life in ledger.hosts.items():
        spent, said_s = spent_by(ledger, name), 0.0
        if life.last_beat is not None:
            said_s = records.decode(HostBeat, fleet_layout.alive(name), life.last_beat).lived_s
        try:
            billed = bill(spent, said_s, shares)
        except ValueError as error:
            ledger.breaks(f"bill: {error}")
            continue
        billed_s = total_s(billed)
        lived_s = max(said_s, spent[-1].entries[-1].ended_s if spent else 0.0)
        if abs(billed_s - lived_s) > ROUNDING_S:
            ledger.breaks(f"bill: {billed_s} s of {name} are billed, which lived {lived_s} s")
        if life.clock_ended_s is not None and lived_s > life.clock_ended_s - life.clock_began_s:
            ledger.breaks(f"bill: {lived_s} s of {name} are billed, which lived less")
        _check_division(ledger, name, billed, _divided(spent, lived_s, shares))


def _divided(spent: list[SpentRecord], lived_s: float, shares: dict[str, float]) -> dict[str | None, float]:
    """The idle seconds that each run has to pay for, by its share among the seated runs."""
    ended_s = spent[-1].entries[-1].ended_s if spent else 0.0
    idle = [(record.seated, entry.seconds) for record in spent for entry in record.entries if entry.run is None]
    idle.append((spent[-1].seated if spent else (), max(0.0, lived_s - ended_s)))
    found: defaultdict[str | None, float] = defaultdict(float)
    for seated, seconds in idle:
        for run in seated:
            found[run] += seconds * shares[run] / sum(shares[each] for each in seated)
        if not seated:
            found[None] += seconds
    return found


def _check_division(ledger: LedgerOfFleet, host: str, billed: Bill, divided: dict[str | None, float]) -> None:
    for run in {*billed, *divided}:
        pays_s, owes_s = billed.get(run, {}).get("idle", 0.0), divided.get(run, 0.0)
        if abs(pays_s - owes_s) > SUMMED_S:
            ledger.breaks(f"payer: {run} pays for {pays_s} idle seconds of {host}, of which {owes_s} are its own")


def check_seated(ledger: LedgerOfFleet, history: FleetHistory, *, undisturbed: bool) -> None:
    """Check that a run pays for idle time only while seated on the host; without faults, for every such second.

    A host without answers from the store learns late that it has lost or won a seat. A host near its end looks no more,
    and bills by the seats of its last look.
    """
    heard_s = noticed_s(history) + history.look_interval_s / SLOWEST_CLOCK if undisturbed else math.inf
    for name, life in ledger.hosts.items():
        for record, entry in _idle(spent_by(ledger, name)):
            late_s = heard_s if entry.ended_s <= life.serves_s else math.inf
            for run, times in life.seated.items():
                began_s, ended_s = entry.began_s, entry.ended_s
                if run in record.seated:
                    foreign_s = entry.seconds - _common_s(began_s, ended_s, [(a, b + late_s) for a, b in times])
                    if foreign_s > SUMMED_S:
                        ledger.breaks(f"payer: {run} pays for {foreign_s} idle seconds of {name} without a seat there")
                elif undisturbed and (own_s := _common_s(began_s, ended_s, [(a + late_s, b) for a, b in times])):
                    ledger.breaks(f"payer: {run} has a seat on {name}, and does not pay for {own_s} idle seconds")
            for run in set(record.seated) - life.seated.keys():
                ledger.breaks(f"payer: {run} pays for idle seconds of {name}, and never had a seat there")
            ledger.counts["idle times compared with seats"] += 1


def _idle(spent: list[SpentRecord]) -> Iterator[tuple[SpentRecord, SpentEntry]]:
    return ((record, entry) for record in spent for entry in record.entries if entry.run is None)


def _common_s(began_s: float, ended_s: float, times: list[tuple[float, float]]) -> float:
    """Seconds of a span that are covered by at least one of `times`, which may overlap."""
    common_s, at_s = 0.0, began_s
    for from_s, until_s in sorted(times):
        common_s += max(0.0, min(ended_s, until_s) - max(at_s, from_s))
        at_s = max(at_s, until_s)
    return common_s


def check_payers(ledger: LedgerOfFleet, history: FleetHistory) -> None:
    """Check that each run pays for its time on the device by activity, in a history without faults.

    A host looks at the device once in a poll interval, after the requests that it makes in between.
    """
    slack_s = noticed_s(history)
    for name, life in ledger.hosts.items():
        if life.clock_ended_s is None or life.ended_s is None:
            continue
        rate = (life.clock_ended_s - life.clock_began_s) / (life.ended_s - life.began_s)
        entries = [entry for record in spent_by(ledger, name) for entry in record.entries]
        billed_s: defaultdict[Use, float] = defaultdict(float)
        for entry in entries:
            billed_s[entry.run or "", entry.iteration] += entry.seconds / rate
            if (entry.kind == "backfill") != (entry.run is not None and entry.iteration is None):
                ledger.breaks(f"bill: {name} records {entry}, and a member has no iteration, as all else has")
        for (run, iteration), device_s in life.device_s.items():
            paid_s, what = billed_s[run, iteration], "a member" if iteration is None else f"its iteration {iteration}"
            times = life.begun[run, iteration]
            if not device_s - virtual_time.ROUNDING_S <= paid_s <= device_s + times * slack_s:
                ledger.breaks(f"bill: {run} pays for {paid_s} s of {name}, and {what} had its device {device_s} s")
            ledger.counts[f"bills compared with the device{' of members' if iteration is None else ''}"] += 1
        _check_stages(ledger, name, life, [(entry, entry.seconds / rate) for entry in entries], slack_s)


def _check_stages(
    ledger: LedgerOfFleet, name: str, life: HostLife, spent: list[tuple[SpentEntry, float]], slack_s: float
) -> None:
    """Check what each run's time is said to be spent on; each change may be noticed late."""
    for run in {run for run, _ in life.begun}:
        times = sum(
            number for (of_run, iteration), number in life.begun.items() if of_run == run and iteration is not None
        )
        for kind, stages in STAGES.items():
            did_s = sum(life.stages_s[run, stage] for stage in stages)
            said_s = sum(seconds for entry, seconds in spent if (entry.run, entry.kind) == (run, kind))
            if abs(did_s - said_s) > times * slack_s:
                ledger.breaks(f"bill: {run} pays for {said_s} s of {name} as {kind}, which took {did_s} s")
