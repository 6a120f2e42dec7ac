"""The checks of a fleet's history after its end; those of each moment are in ledger_of_fleet.py.

They read what lies in the store, and what the ledger saw. Bills are made by production's rules and compared with the
lifetimes of hosts that the ledger measured.
"""

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from simulation import virtual_time
from simulation.ledger_of_fleet import FASTEST_CLOCK, FLEET, SLOWEST_CLOCK, HostLife, LedgerOfFleet
from simulation.one_thread import threads_in_turn
from simulation.simulated_fleet import SimulatedFleet
from simulation.simulated_fleet_history import FleetHistory
from storage import fleet_layout, records
from storage.fleet_records import HostBeat, SpentRecord
from storage.memory import NestedStore
from tasks.sharing.billing import bill, total_s
from tasks.sharing.host import BEATS_PER_TTL

ROUNDING_S = 1e-9
# How long the requests take that a host makes between two looks at its device, if the store is well.
NOTICED_S = 15.0
# Requests of a host beside those that follow from its intervals: its beginning and end, and repeated ones.
REQUESTS_AT_LEAST, REQUESTS_PER_PHASE, REPEATED = 60, 20, 1.5


@dataclass(frozen=True)
class FleetOutcome:
    """The course of a history. broken: the rules that did not hold. repeats: phases computed more than once."""

    broken: list[str]
    events: list[tuple[float, str, str]]
    counts: Counter[str]
    ended_at_s: float
    repeats: int
    faults: int
    requests_to_bound: float


def live_and_judge_fleet(history: FleetHistory) -> FleetOutcome:
    """Simulate the history of a fleet and check it."""
    fleet = SimulatedFleet(history)
    with threads_in_turn():
        ledger = fleet.run()
    _check_ends(fleet)
    _check_published(fleet)
    repeats, faults = _check_repeats(fleet)
    _check_bills(ledger)
    _check_payers(ledger, history)
    _check_restored(ledger, history)
    counts = ledger.counts
    counts.update({"phases": ledger.computed.total(), "hosts": len(ledger.hosts), "repeats": repeats})
    return FleetOutcome(
        broken=ledger.broken,
        events=ledger.events,
        counts=counts,
        ended_at_s=ledger.now(),
        repeats=repeats,
        faults=faults,
        requests_to_bound=_check_requests(ledger, history),
    )


def _check_ends(fleet: SimulatedFleet) -> None:
    if fleet.unfinished:
        fleet.ledger.breaks(f"livelock: runs {sorted(fleet.unfinished)} have not ended")
    for name, life in fleet.ledger.hosts.items():
        if life.ended_s is None:
            fleet.ledger.breaks(f"livelock: {name} has not ended")


def _check_published(fleet: SimulatedFleet) -> None:
    """Check that every phase of a run that has not left was published once, and follows from the one before."""
    ledger = fleet.ledger
    for number, (run, folder) in enumerate(ledger.runs.items()):
        for iteration in range(fleet.history.runs[number].iterations):
            times = ledger.published[run, iteration]
            if times != 1 and (number not in fleet.left or times > 1):
                ledger.breaks(f"lost: iteration {iteration} of {folder} was published {times} times")
            if (run, iteration + 1) in ledger.checkpoints:
                metadata, _ = ledger.checkpoints[run, iteration + 1]
                if metadata["from"] != ledger.checkpoints[run, iteration][1]:
                    ledger.breaks(
                        f"changed: checkpoint {iteration + 1} of {folder} does not follow from the one before"
                    )


def _check_repeats(fleet: SimulatedFleet) -> tuple[int, int]:
    """Check that phases are computed again only after faults: (repeats, faults).

    A fault is a process that died with a phase, a host that was silent for a TTL, or a run that left. A host that dies
    or is silent may have several phases under way: one trains while others are published.
    """
    ledger = fleet.ledger
    silent_s = fleet.history.host_ttl_s / FASTEST_CLOCK
    silences = sum(_silences(life, silent_s) for life in ledger.hosts.values())
    repeats = ledger.computed.total() - ledger.published.total()
    faults = ledger.faults + silences + len(fleet.left)
    if repeats > faults:
        ledger.breaks(f"repeats: {repeats} phases were computed again, after {faults} faults")
    return repeats, faults


def _silences(life: HostLife, silent_s: float) -> int:
    """How often a host was silent for so long while it lived; each counts for every phase that was under way then."""
    moments = [life.began_s, *life.beats, *([] if life.ended_s is None else [life.ended_s])]
    phases = [*life.ended, *((began_s, math.inf) for began_s in life.under_way.values())]
    return sum(
        max(1, sum(began_s < after and ended_s > before for began_s, ended_s in phases))
        for before, after in itertools.pairwise(moments)
        if after - before >= silent_s
    )


def _check_bills(ledger: LedgerOfFleet) -> None:
    """Check that every second of every host is billed once."""
    store = NestedStore(ledger.store, FLEET.removesuffix("/"))
    shares = dict.fromkeys(ledger.runs, 1.0)
    for number, run in enumerate(ledger.runs):
        shares[run] = 1.0 + number
    for name, life in ledger.hosts.items():
        spent = [records.read(store, SpentRecord, key) for key in store.list(fleet_layout.spent_by(name))]
        said_s = 0.0
        if life.last_beat is not None:
            said_s = records.decode(HostBeat, fleet_layout.alive(name), life.last_beat).lived_s
        try:
            billed_s = total_s(bill(spent, said_s, shares))
        except ValueError as error:
            ledger.breaks(f"bill: {error}")
            continue
        lived_s = max(said_s, spent[-1].entries[-1].ended_s if spent else 0.0)
        if abs(billed_s - lived_s) > ROUNDING_S:
            ledger.breaks(f"bill: {billed_s} s of {name} are billed, which lived {lived_s} s")
        if life.clock_ended_s is not None and lived_s > life.clock_ended_s - life.clock_began_s:
            ledger.breaks(f"bill: {lived_s} s of {name} are billed, which lived less")


def _check_payers(ledger: LedgerOfFleet, history: FleetHistory) -> None:
    """Check that each run pays for the time in which it had the device, where nothing went wrong.

    A host looks at the device once in a poll interval, after the requests that it makes in between.
    """
    if not _is_undisturbed(history):
        return
    store = NestedStore(ledger.store, FLEET.removesuffix("/"))
    for name, life in ledger.hosts.items():
        if life.clock_ended_s is None or life.ended_s is None:
            continue
        rate = (life.clock_ended_s - life.clock_began_s) / (life.ended_s - life.began_s)
        spent = [records.read(store, SpentRecord, key) for key in store.list(fleet_layout.spent_by(name))]
        billed_s: defaultdict[tuple[str, bool], float] = defaultdict(float)
        for entry in (entry for record in spent for entry in record.entries):
            billed_s[entry.run or "", entry.kind == "backfill"] += entry.seconds / rate
        noticed_s = history.poll_interval_s / SLOWEST_CLOCK + NOTICED_S
        for had_s, helped, times in ((life.device_s, False, life.phases), (life.helped_s, True, life.helps)):
            for run, device_s in had_s.items():
                paid_s = billed_s[run, helped]
                if not device_s - virtual_time.ROUNDING_S <= paid_s <= device_s + times * noticed_s:
                    what = "a member" if helped else "it"
                    ledger.breaks(f"bill: {run} pays for {paid_s} s of {name}, and {what} had its device {device_s} s")
                ledger.counts[f"bills compared with the device{' of members' if helped else ''}"] += 1


def _is_undisturbed(history: FleetHistory) -> bool:
    return not history.strikes and not history.crashes and not history.hangs and history.weather == history.calm


def _check_restored(ledger: LedgerOfFleet, history: FleetHistory) -> None:
    """Check that hosts record how each state was restored, once, where nothing went wrong."""
    if not _is_undisturbed(history):
        return
    store = NestedStore(ledger.store, FLEET.removesuffix("/"))
    for name, life in ledger.hosts.items():
        spent = [records.read(store, SpentRecord, key) for key in store.list(fleet_layout.spent_by(name))]
        said = Counter((each.run, each.iteration, each.tier, each.ahead) for one in spent for each in one.restored)
        if life.clock_ended_s is not None and said != life.restored:
            ledger.breaks(f"tiers: {name} records {dict(said)}, and its workers restored {dict(life.restored)}")
        ledger.counts["records of tiers compared"] += 1


def _check_requests(ledger: LedgerOfFleet, history: FleetHistory) -> float:
    """Check that the requests of each host are bounded by its lifetime; returns the largest part of a bound."""
    runs, hosts = len(ledger.runs), len(ledger.hosts)
    looks = 3 + hosts + runs
    # Before a member is started, a host looks at most so often what is unfinished.
    quiet_s = min((host.backfill_s for host in history.hosts if host.backfill_s is not None), default=float("inf"))
    per_s = (
        runs / history.poll_interval_s
        + looks / history.look_interval_s
        + runs / quiet_s
        + BEATS_PER_TTL / history.host_ttl_s
    )
    largest = 0.0
    for name, life in ledger.hosts.items():
        lived_s = (ledger.now() if life.ended_s is None else life.ended_s) - life.began_s
        often = REPEATED * FASTEST_CLOCK * per_s * lived_s
        bound = REQUESTS_AT_LEAST + 10 * runs + 2 * hosts + REQUESTS_PER_PHASE * life.phases + often
        largest = max(largest, life.calls / bound)
        if life.calls > bound:
            ledger.breaks(f"requests: {name} made {life.calls}, allowed: {bound:.0f}")
    return largest
