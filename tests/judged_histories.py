"""Simulated histories of a crew with a bug put in, judged until the bug is found."""

from collections import Counter
from collections.abc import Iterable, Iterator

from simulation.judge import live_and_judge
from simulation.simulated_history import History, draw_history


def all_come(seeds: Iterable[int]) -> Iterator[History]:
    """The histories of these seeds, without machines that do not come."""
    return (draw_history(seed, all_come=True) for seed in seeds)


def is_found(histories: Iterable[History], **times: int) -> bool:
    """Whether each named rule is broken by so many of the histories; those left when that is known are not lived."""
    wanted = Counter(times)
    for history in histories:
        wanted -= Counter({rule.split(":", 1)[0] for rule in live_and_judge(history).broken})
        if not wanted:
            return True
    return False
