"""Claim: whatever happens to a pool of scorers, each trained response has the teacher's scores of its own tokens, once.

Each seed is one simulated iteration with `teacher.pool`: production's sessions of members and scorers, claims,
journals, and the trainer's waits and scoring, a scripted engine and a scripted teacher, a faulty store in memory and a
virtual clock (simulation/simulated_scoring.py). Scorers are killed, frozen, suspended and preempted, come late and
twice; claims on responses come late, and lives of members decode other tokens, so that ends that scorers have read
become void.
`--seed K --trace` shows one history event by event.
"""

from benchmarks.many_seeds import Verdict, finish_histories, play, run_command, show
from simulation.judge_scoring import live_and_judge_scoring
from simulation.simulated_scoring import draw_scoring_history

RULES = {
    "lost": "histories with a trained response without scores, or a claim that sealed without a look",
    "doubled": "histories with a response scored twice, or an object that was overwritten",
    "changed": "histories with a score that is not the one of the trained tokens",
    "livelock": "histories that did not end, or whose trainer waited in vain again and again",
    "error": "histories with a process that ended by an error of its own",
}


def run_seeds(seeds: range) -> list[Verdict]:
    """Simulate and check the histories of these seeds, in this process."""
    return play(_verdict, seeds)


def _verdict(seed: int) -> Verdict:
    outcome = live_and_judge_scoring(draw_scoring_history(seed))
    return Verdict(seed, tuple(outcome.broken), outcome.counts, outcome.ended_at_s)


def trace(seed: int) -> bool:
    """Print the history of a seed; returns whether every rule held."""
    (outcome,) = play(lambda each: live_and_judge_scoring(draw_scoring_history(each)), [seed])
    return show(seed, outcome.ledgers.common.events, outcome.broken, outcome.counts)


def report(verdicts: list[Verdict], wall_s: float, processes: int, as_json: bool) -> None:
    """Print the counts of events, and targets for those that must never happen."""
    finish_histories(
        "scoring_histories",
        RULES,
        verdicts,
        wall_s,
        processes,
        as_json=as_json,
        results=lambda counts: {
            "responses_trained": counts["responses trained"],
            "responses_scored_again": counts["responses scored again"],
        },
    )


if __name__ == "__main__":
    run_command(__doc__, run_seeds, trace, report)
