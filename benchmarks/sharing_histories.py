"""Claim: whatever happens to a fleet, every phase is published once, and is computed again only after a fault.

Each seed is one simulated fleet: production's hosts with their seats, placement, order and bills, simulated runs and
workers, a faulty store in memory and a virtual clock (simulation/simulated_fleet.py). Hosts die, freeze, are suspended,
leave and come late; workers die and hang; copies on disks are damaged; wall clocks are off by hours; heartbeats become
garbage; stores are denied, lose, delay and repeat requests; runs leave. `--seed K --trace` shows one history event by
event.
"""

from dataclasses import dataclass

from benchmarks import many_seeds
from benchmarks.many_seeds import finish_histories, play, run_command, show
from simulation.judge_fleet import live_and_judge_fleet
from simulation.simulated_fleet_history import draw_fleet_history

RULES = {
    "livelock": "histories that did not end",
    "lost": "histories with a phase that was not published exactly once",
    "changed": "histories with a checkpoint that does not follow from the one before",
    "doubled": "histories in which a host trained two at once, or an object was overwritten",
    "early": "histories with a phase that began before it was due",
    "hasty": "histories with a seat taken from a host that was not silent for its TTL",
    "seat": "histories in which a host began a phase without asking whether its run's seat was still its own",
    "stay": "histories in which a host began a phase after it was to leave, or did not say that it was gone",
    "resident": "histories in which a resident state of another digest was used",
    "stale": "histories in which a state of another checkpoint was restored",
    "copy": "histories in which a damaged copy of a state was used",
    "memory": "histories with more resident states than memory, or more copies than disk",
    "tiers": "histories in which a host did not record from where a state came",
    "repeats": "histories with more phases computed again than faults",
    "bill": "histories with a second of a host that was not billed exactly once",
    "payer": "histories with idle time that was billed to others than those who were seated then",
    "requests": "histories with more requests than a host's lifetime allows",
    "error": "histories with a process that ended by an error of its own",
}


@dataclass(frozen=True)
class Verdict(many_seeds.Verdict):
    """The results that are kept of a history."""

    repeats: int
    faults: int
    requests_to_bound: float


def run_seeds(seeds: range) -> list[Verdict]:
    """Simulate and check the histories of these seeds, in this process."""
    return play(_verdict, seeds)


def _verdict(seed: int) -> Verdict:
    outcome = live_and_judge_fleet(draw_fleet_history(seed))
    return Verdict(
        seed,
        tuple(outcome.broken),
        outcome.counts,
        outcome.ended_at_s,
        outcome.repeats,
        outcome.faults,
        outcome.requests_to_bound,
    )


def trace(seed: int) -> bool:
    """Print the history of a seed; returns whether every rule held."""
    (outcome,) = play(lambda each: live_and_judge_fleet(draw_fleet_history(each)), [seed])
    return show(seed, outcome.events, outcome.broken, outcome.counts)


def report(verdicts: list[Verdict], wall_s: float, processes: int, as_json: bool) -> None:
    """Print the counts of events, and targets for those that must never happen."""
    finish_histories(
        "sharing_histories",
        RULES,
        verdicts,
        wall_s,
        processes,
        as_json=as_json,
        results=lambda counts: {
            "phases": counts["phases"],
            "repeats": sum(verdict.repeats for verdict in verdicts),
            "faults": sum(verdict.faults for verdict in verdicts),
            "requests_to_bound_max": max(verdict.requests_to_bound for verdict in verdicts),
        },
    )


if __name__ == "__main__":
    run_command(__doc__, run_seeds, trace, report)
