"""Claim: whatever happens to a crew, no token is lost, doubled or changed, every iteration ends, promises are kept.

The promises: a kill costs at most what was decoded since the last flush, a notice costs nothing, and what no longer
counts is soon not decoded any more (simulation/judge_promises.py).

Each seed is one simulated run: production session, claims, journal and rebalancing, a scripted engine, a faulty store
in memory and a virtual clock (simulation/simulated_run.py). In a third of the histories, groups of equal rewards are
filtered, and the iteration closes when enough others are recorded. In some, members have small batches, cut, or run on
the trainer's machine for a while. In half of them, slots come too late, never, or die for good, and the trainer's
machine generates when no other member does. Three in ten go on over two or three iterations, with production's
planner, publication, conclusion and sweeps; in four of ten of these the crew stands. `--seed K --trace` shows one
history event by event.
"""

from dataclasses import dataclass

from benchmarks import many_seeds
from benchmarks.many_seeds import finish_histories, play, run_command, show
from simulation.judge import live_and_judge
from simulation.simulated_history import draw_history

RULES = {
    "lost": "histories with something lost",
    "doubled": "histories with something doubled",
    "changed": "histories with something changed",
    "filter": "histories that trained, filtered or left out other groups than their rewards say",
    "livelock": "histories that did not end, or went round in circles",
    "promise": "times a promise of kills, notices or work in vain was broken",
    "turns": "times a call was made too early, made again, or not known to be",
    "waits": "histories that waited for machines that did not come",
    "late": "histories in which a member that came after closing wrote something",
    "error": "histories with a process that ended by an error of its own",
}


@dataclass(frozen=True)
class Verdict(many_seeds.Verdict):
    """The results that are kept of a history."""

    requests_to_bound: float
    promise_to_bound: float = 0.0
    wait_to_bound: float = 0.0


def run_seeds(seeds: range) -> list[Verdict]:
    """Simulate and check the histories of these seeds, in this process."""
    return play(_verdict, seeds)


def _verdict(seed: int) -> Verdict:
    outcome = live_and_judge(draw_history(seed))
    return Verdict(
        seed,
        tuple(outcome.broken),
        outcome.counts,
        outcome.ended_at_s,
        outcome.requests_to_bound,
        outcome.promise_to_bound,
        outcome.wait_to_bound,
    )


def trace(seed: int) -> bool:
    """Print the history of a seed; returns whether every rule held."""
    (outcome,) = play(lambda each: live_and_judge(draw_history(each)), [seed])
    return show(seed, outcome.ledger.events, outcome.broken, outcome.counts)


def report(verdicts: list[Verdict], wall_s: float, processes: int, as_json: bool) -> None:
    """Print the counts of events, and targets for those that must never happen."""
    finish_histories(
        "histories",
        RULES,
        verdicts,
        wall_s,
        processes,
        as_json=as_json,
        results=lambda counts: {
            "requests_per_response": counts["requests"] / counts["responses"],
            "requests_to_bound_max": max(verdict.requests_to_bound for verdict in verdicts),
            "promise_to_bound_max": max(verdict.promise_to_bound for verdict in verdicts),
            "wait_to_bound_max": max(verdict.wait_to_bound for verdict in verdicts),
        },
    )


if __name__ == "__main__":
    run_command(__doc__, run_seeds, trace, report)
