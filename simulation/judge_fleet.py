"""The checks of a fleet's history after its end; those of each moment are in ledger_of_fleet.py.

The checks read the store and the ledger; checks of bills are in judge_payers.py.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from simulation.judge_payers import check_bills, check_payers, check_seated, noticed_s, spent_by
from simulation.ledger_of_fleet import FASTEST_CLOCK, HostLife, LedgerOfFleet
from simulation.one_thread import threads_in_turn
from simulation.simulated_fleet import SimulatedFleet
from simulation.simulated_fleet_history import FleetHistory
from tasks.sharing.host import BEATS_PER_TTL

# Requests of a host beside those that follow from its intervals: its beginning and end, and repeated ones.
REQUESTS_AT_LEAST, REQUESTS_PER_PHASE, REPEATED = 60, 20, 1.5


@dataclass(frozen=True)
class FleetOutcome:
    """The course of a history.

    Attributes:
        broken: the broken rules.
        events: (time, process, event) of the trace.
        repeats: number of phases computed more than once.
    """

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
    undisturbed = _is_undisturbed(history)
    check_bills(ledger)
    check_seated(ledger, history, undisturbed=undisturbed)
    if undisturbed:
        check_payers(ledger, history)
        _check_restored(ledger)
        _check_stays(ledger, history)
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
                if metadata["from"] not in ledger.states(run, iteration):
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
    """Number of silences of a host while it lived; each counts for every phase under way at its time."""
    moments = [life.began_s, *life.beats, *([] if life.ended_s is None else [life.ended_s])]
    phases = [*life.ended, *((began_s, math.inf) for began_s in life.under_way.values())]
    return sum(
        max(1, sum(began_s < after and ended_s > before for began_s, ended_s in phases))
        for before, after in itertools.pairwise(moments)
        if after - before >= silent_s
    )


def _is_undisturbed(history: FleetHistory) -> bool:
    return not history.strikes and not history.crashes and not history.hangs and history.weather == history.calm


def _check_restored(ledger: LedgerOfFleet) -> None:
    """Check that hosts record how each state was restored, once, where nothing went wrong."""
    for name, life in ledger.hosts.items():
        restored = (each for record in spent_by(ledger, name) for each in record.restored)
        said = Counter((each.run, each.iteration, each.tier, each.ahead) for each in restored)
        if life.clock_ended_s is not None and said != life.restored:
            ledger.breaks(f"tiers: {name} records {dict(said)}, and its workers restored {dict(life.restored)}")
        ledger.counts["records of tiers compared"] += 1


def _check_stays(ledger: LedgerOfFleet, history: FleetHistory) -> None:
    """In a history without faults, check that hosts begin nothing after their hours and announce their end."""
    for name, life in ledger.hosts.items():
        if life.clock_ended_s is not None and not life.said_gone:
            ledger.breaks(f"stay: {name} has ended, and its heartbeat does not say so")
        if life.stays_s is not None and life.last_begun_s > life.stays_s + noticed_s(history):
            ledger.breaks(f"stay: {name} begins a phase after {life.last_begun_s} s, told to stay {life.stays_s} s")


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
