"""Simulated histories of a crew with a bug put in, judged until the bug is found.

The default seeds are those that `python -m benchmarks.histories` plays. Which of them show a bug changes with every
draw, so tests name what a history must have for the bug to show, and never a seed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from simulation.judge import live_and_judge
from simulation.simulated_history import History, draw_history

DEFAULT_SEEDS = range(400)


def drawn(
    wanted: Callable[[History], bool] = lambda _: True, *, iterations: int = 1, seeds: Iterable[int] = DEFAULT_SEEDS
) -> Iterator[History]:
    """The histories of so many iterations that have what is wanted."""
    histories = (draw_history(seed) for seed in seeds)
    return (history for history in histories if history.iterations == iterations and wanted(history))


def is_found(histories: Iterable[History], **times: int) -> bool:
    """Whether each named rule is broken by so many of the histories; those left when that is known are not lived."""
    wanted = Counter(times)
    for history in histories:
        wanted -= Counter({rule.split(":", 1)[0] for rule in live_and_judge(history).broken})
        if not wanted:
            return True
    return False
